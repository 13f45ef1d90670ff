"""Chunks of a few bytes, from messages in memory."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec import short_chunks
from bngrad_server.codec.short_chunks import ShortChunks
from bngrad_wire import chunks

COUNT = 5000


def receive(limit: ShortChunks, chunk: bytes, count: int) -> float:
    """Receives a tensor in equal chunks, and returns the seconds that it took the thread."""
    messages = iter([pb.ExchangeRequest(chunk=chunk).SerializeToString()] * count)
    target = memoryview(bytearray(len(chunk) * count))
    began = time.thread_time()
    source = chunks.WholeMessages(functools.partial(next, messages, None))
    chunks.receive(source, chunks.REQUEST_CHUNK, target, limit.counter())
    return time.thread_time() - began


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_rest_for_longer_than_short_chunks_occupy_them(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    limit = ShortChunks()
    stopped = SimpleNamespace(thread_time=time.thread_time, monotonic=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(short_chunks, "time", stopped)  # on a busy machine, time passes that no thread is given
    with ThreadPoolExecutor(threads) as pool:
        spent = sum(pool.map(lambda _: receive(limit, b"x", COUNT), range(threads)))
    assert limit._rests_end_at > 4 * spent
    assert len(slept) == threads * (COUNT // 32)


def test_other_chunks_are_not_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it rests"))
    receive(ShortChunks(), bytes(chunks.SHORT_NBYTES), COUNT)


class Thread:
    """The time of a thread that rests in no time."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self.rests: list[float] = []

    def thread_time(self) -> float:
        return self.used_s

    def monotonic(self) -> float:
        return self.used_s + sum(self.rests)

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)


def test_a_thread_rests_nine_times_as_long_as_it_was_busy_since_its_last_rest_and_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = Thread()
    monkeypatch.setattr(short_chunks, "time", thread)
    count_chunk = ShortChunks().counter()
    for busy_s in (0.01, 0.01, 1.0, 0.01):
        thread.used_s += busy_s
        for _ in range(32):
            count_chunk()
    assert thread.rests == pytest.approx([0.09, 0.09, 1.0, 1.0])
