"""Chunks of a few bytes, from messages in memory."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
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
    monkeypatch.setattr(time, "sleep", slept.append)
    with ThreadPoolExecutor(threads) as pool:
        spent = sum(pool.map(lambda _: receive(limit, b"x", COUNT), range(threads)))
    assert limit._rests_end_at - time.monotonic() > 4 * spent
    assert len(slept) == threads * (COUNT // 32)


def test_other_chunks_are_not_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it rests"))
    receive(ShortChunks(), bytes(chunks.SHORT_NBYTES), COUNT)
