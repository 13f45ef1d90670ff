"""Large calls of connections with several: received whole where there is memory for that, else by a thread."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import pytest
from tests.raw_http2 import data, headers, prefixed
from tests.unit.server.rpc.http2.raw_client import Raw, check_sum, increments, raw
from tests.unit.server.rpc.http2.service import PATH, Service, check_works
from tests.unit.server.workers.additions import TIMEOUT_S, inputs, request_of, wait_until

from bngrad_server.rpc.http2.lanes import arriving
from bngrad_wire.http2 import Uploads, frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.server.call import WHOLE_NBYTES
from bngrad_wire.http2.server.lane import Lane

SHAPE = (10, 50, 50, 3)
MESSAGE = prefixed(request_of(inputs(shape=SHAPE)).SerializeToString())
"""More than may be sent of a call before something reads it."""
EMPTY_END = data(b"", 3, end=True)
INTERNAL = 13


@pytest.fixture
def uploads(service: Service) -> Iterator[Uploads]:
    """Those of the service, which have given back all memory in the end."""
    uploads = service.port._connections.lanes.uploads
    free_nbytes = uploads.free_nbytes
    yield uploads
    wait_until(lambda: uploads.free_nbytes == free_nbytes and uploads.count == 0)
    check_works(service)


@pytest.fixture
def client(service: Service) -> Raw:
    """A client that has made a call, and takes answers of any size."""
    windows = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}) + frames.window_update(0, 2**30)
    client = raw(service, frames.PREFACE + windows)
    client.ask(1)
    check_sum(client.answer(1))
    return client


class Upload:
    """A call whose message is sent as far as its window allows.

    Attributes:
        stream_id: The number of its stream.
        allowed: How much may be sent of it in all, as far as is known.
    """

    def __init__(self, client: Raw, stream_id: int = 3) -> None:
        self.stream_id = stream_id
        self.allowed = WHOLE_NBYTES
        self._client = client
        self._sent = 0
        client.send(headers(PATH, stream_id))

    def await_window(self, nbytes: int = len(MESSAGE)) -> None:
        """Waits until so much may be sent in all."""

        def is_open() -> bool:
            if self.allowed < nbytes:
                self.allowed += increments(self._client, self.stream_id)
            return self.allowed >= nbytes

        wait_until(is_open)

    def send(self, end: int = len(MESSAGE), sizes: tuple[int, ...] = (frames.MIN_FRAME_SIZE,)) -> None:
        """Sends the next part of the message, in frames of such sizes; ends the call with the message."""
        choices = itertools.cycle(sizes)
        while self._sent < end:
            start, self._sent = self._sent, min(self._sent + next(choices), end)
            self.await_window(self._sent)
            is_last = self._sent == len(MESSAGE)
            self._client.send(data(MESSAGE[start : self._sent], self.stream_id, end=is_last))

    def skip(self, end: int) -> None:
        """Goes on after a part of the message that was sent otherwise."""
        self._sent = end

    def check_sum(self) -> None:
        """Checks the answer."""
        check_sum(self._client.answer(self.stream_id), shape=SHAPE)


@pytest.fixture
def upload(client: Raw) -> Upload:
    """A call that has begun."""
    upload = Upload(client)
    upload.send(5)
    return upload


@pytest.fixture
def without_threads(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread receives anything, so that only what is received without one is answered."""
    monkeypatch.setattr(arriving, "_UNARY_REST_S", TIMEOUT_S)
    service.port._calls._receiving._shares._free = 0


@pytest.mark.usefixtures("without_threads")
def test_the_window_opens_for_all_of_a_message_once_it_begins(client: Raw, uploads: Uploads) -> None:
    free_nbytes = uploads.free_nbytes
    upload = Upload(client)
    upload.send(5)
    upload.await_window()
    assert uploads.free_nbytes == free_nbytes - len(MESSAGE)
    upload.send()
    upload.check_sum()


@pytest.mark.parametrize("pause_at", [5, 100, 10**5, len(MESSAGE) - 1, len(MESSAGE)])
@pytest.mark.parametrize("sizes", [(1000,), (2**14,), (1, 2**14), (2**17,)])
def test_a_call_that_pauses_goes_on_in_a_thread(
    service: Service,
    uploads: Uploads,
    upload: Upload,
    monkeypatch: pytest.MonkeyPatch,
    pause_at: int,
    sizes: tuple[int, ...],
) -> None:
    monkeypatch.setattr(arriving, "_LARGE_REST_S", 0.01)
    upload.await_window()
    upload.send(pause_at, sizes)
    if pause_at < len(MESSAGE):
        wait_until(lambda: len(service.port._connections.lent) == 1)
        upload.send(sizes=sizes)
    upload.check_sum()


def test_no_memory_is_taken_for_a_client_at_its_limit(
    service: Service, client: Raw, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: service.is_at_rest)
    admission = service.engine.admission
    (connection,) = service.port._connections._all
    assert connection.http.may_take_memory()
    monkeypatch.setattr(admission, "_max_client_requests", 0)
    admission._refused_of[connection.client] = 0, math.inf  # as after a refusal
    assert not connection.http.may_take_memory()
    free_nbytes = uploads.free_nbytes
    upload = Upload(client)
    upload.send(WHOLE_NBYTES)
    wait_until(lambda: len(service.port._calls._receiving) == 1)
    assert uploads.free_nbytes == free_nbytes
    monkeypatch.undo()
    del admission._refused_of[connection.client]
    upload.send()
    upload.check_sum()


@pytest.mark.usefixtures("without_threads")
def test_a_call_whose_memory_was_taken_may_take_longer_to_arrive(
    service: Service, uploads: Uploads, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "_LARGE_REST_S", TIMEOUT_S)
    upload.await_window()
    (others,) = service.port._calls._arriving._all.values()
    others.update(dict.fromkeys(others, time.monotonic()))  # as if the time for small ones had passed
    time.sleep(0.3)
    upload.send()
    upload.check_sum()


@pytest.mark.parametrize("sizes", [(1000,), (2**14,), (1, 2**14), (2**17,)])
@pytest.mark.parametrize("are_received_whole", [True, False])
def test_calls_arrive_amid_each_other(
    client: Raw, uploads: Uploads, sizes: tuple[int, ...], *, are_received_whole: bool
) -> None:
    taken = 0 if are_received_whole else uploads.free_nbytes
    uploads.free_nbytes -= taken
    several = [Upload(client, stream_id) for stream_id in (3, 5, 7)]
    for end in [*range(5, len(MESSAGE), 50_000), len(MESSAGE)]:
        for upload in several:
            upload.send(end, sizes)
    for upload in several:
        upload.check_sum()
    uploads.free_nbytes += taken


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.usefixtures("without_threads")
def test_the_end_may_come_by_itself(client: Raw, uploads: Uploads, upload: Upload, is_at_once: bool) -> None:
    upload.await_window()
    rest = [data(MESSAGE[5:], upload.stream_id), data(b"", upload.stream_id), EMPTY_END]
    for part in [b"".join(rest)] if is_at_once else rest:
        client.send(part)
    upload.check_sum()


@pytest.mark.parametrize("pause_at", [1000, len(MESSAGE)])
def test_a_message_is_answered_before_its_call_has_an_end(
    service: Service, client: Raw, uploads: Uploads, upload: Upload, pause_at: int
) -> None:
    upload.await_window()
    client.send(data(MESSAGE[5:pause_at], upload.stream_id))
    if pause_at < len(MESSAGE):
        wait_until(lambda: len(service.port._connections.lent) == 1)
        client.send(data(MESSAGE[pause_at:], upload.stream_id))
    upload.check_sum()


@pytest.mark.parametrize("sent", [5, 1000, len(MESSAGE) - 1])
@pytest.mark.parametrize("end", ["reset", "close", "half-close"])
def test_a_call_that_ends_early_gives_its_memory_back(
    service: Service, client: Raw, uploads: Uploads, upload: Upload, sent: int, end: str
) -> None:
    upload.await_window()
    upload.send(sent)
    if end == "reset":
        client.send(frames.rst_stream(upload.stream_id, ErrorCode.CANCEL))
    elif end == "close":
        client.close()
    else:
        client.send(EMPTY_END)
        assert client.status(upload.stream_id) == INTERNAL
    wait_until(lambda: service.is_at_rest)


def test_calls_beyond_the_memory_are_received_by_threads(client: Raw, uploads: Uploads) -> None:
    taken_nbytes, uploads.free_nbytes = uploads.free_nbytes - len(MESSAGE) - 1, len(MESSAGE) + 1
    calls = [Upload(client, stream_id) for stream_id in (3, 5, 7)]
    for call in calls:
        call.send(5)
    calls[0].await_window()
    assert uploads.free_nbytes == 1
    for call in calls:
        call.send()
        call.check_sum()
    uploads.free_nbytes += taken_nbytes


def test_a_call_is_received_by_a_thread_where_there_is_no_memory(
    client: Raw, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Lane, "expect_whole", no_memory)
    free_nbytes = uploads.free_nbytes
    upload = Upload(client)
    upload.send(len(MESSAGE) - 1)
    assert uploads.free_nbytes == free_nbytes
    upload.send()
    upload.check_sum()


def test_what_follows_the_message_does_no_harm(client: Raw, uploads: Uploads, upload: Upload) -> None:
    """As grpcio does, it has no answer."""
    upload.await_window()
    client.send(data(MESSAGE[5:], upload.stream_id))
    upload.await_window(len(MESSAGE) + 1005)
    client.send(data(prefixed(bytes(1000)), upload.stream_id), EMPTY_END)
    upload.check_sum()


def test_a_message_whose_size_comes_in_two_frames_is_received_by_a_thread(client: Raw, uploads: Uploads) -> None:
    free_nbytes = uploads.free_nbytes
    upload = Upload(client)
    client.send(data(MESSAGE[:3], 3) + data(MESSAGE[3:5], 3))
    upload.skip(5)
    upload.send(len(MESSAGE) - 1)
    assert uploads.free_nbytes == free_nbytes
    upload.send()
    upload.check_sum()


@pytest.mark.parametrize("flags", [0, frames.END_STREAM])
def test_the_rest_of_a_frame_is_discarded_if_its_call_has_ended(
    service: Service, client: Raw, uploads: Uploads, flags: int
) -> None:
    frame = frames.frame_header(50_000, frames.DATA, flags, 3) + b"\7" + bytes(49_999)  # flagged 7, neither 0 nor 1
    client.send(headers(PATH, 3), frame[:1000])
    assert client.status(3) == INTERNAL
    (connection,) = service.port._connections._all
    wait_until(lambda: not connection.lanes)
    assert connection.http._receiving is None
    client.send(frame[1000:])
    client.ask(5)
    check_sum(client.answer(5))
