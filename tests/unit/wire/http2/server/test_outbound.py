"""What a connection sends for its lanes: whole, in order, in turns, and no more than windows have room for."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames
from bngrad_wire.http2.server.outbound import Batch, KeptAnswers, OutboundQueue, Part

END = frames.END_HEADERS | frames.END_STREAM


def data(nbytes: int, stream_id: int, *, is_joined: bool) -> list[Buffer]:
    """A frame with DATA in one piece, or in three, of which one is empty."""
    header, content = frames.frame_header(nbytes, frames.DATA, 0, stream_id), bytes(i % 251 for i in range(nbytes))
    return (
        [header + content] if is_joined else [header, content[: nbytes // 3], b"", memoryview(content)[nbytes // 3 :]]
    )


def content_of(pieces: Sequence[Buffer], max_frame_size: int = frames.LARGEST_FRAME_SIZE) -> bytes:
    """The DATA in frames, which are no larger; the last one is a header block, with the trailers."""
    whole, found, kinds = b"".join(pieces), b"", []
    while whole:
        length, kind, flags, _ = frames.parse_header(whole, 0)
        payload, whole = whole[frames.HEADER_NBYTES :][:length], whole[frames.HEADER_NBYTES + length :]
        kinds.append((kind, flags))
        found += payload if kind == frames.DATA else b""
        assert kind != frames.DATA or length <= max_frame_size
    assert kinds[-1] in [(frames.HEADERS, END), (frames.CONTINUATION, frames.END_HEADERS)]
    assert all(flags == 0 for kind, flags in kinds if kind == frames.DATA)
    return found


sizes = st.integers(0, 300)


@given(
    answers=st.lists(st.lists(st.tuples(sizes, st.booleans(), st.booleans()), max_size=4), min_size=1, max_size=4),
    block_nbytes=st.sampled_from([10, 40_000]),
    rooms=st.lists(st.integers(0, 200), min_size=1, max_size=20).filter(any),
    max_frame_size=st.sampled_from([1, 7, 30, 1000]),
)
def test_each_stream_gets_its_frames_whole_and_in_order(
    answers: list[list[tuple[int, bool, bool]]], block_nbytes: int, rooms: list[int], max_frame_size: int
) -> None:
    queue = OutboundQueue(KeptAnswers(0))
    given_pieces: dict[int, list[Buffer]] = {}
    waits: list[threading.Event] = []
    told: list[tuple[int, bool]] = []
    for stream_id, answer in zip(itertools.count(1, 2), answers, strict=False):
        trailers = frames.header_block(stream_id, bytes(block_nbytes), frames.END_STREAM)
        batches: list[tuple[Sequence[Buffer], bool]] = [
            *((data(nbytes, stream_id, is_joined=joined), waited) for nbytes, joined, waited in answer),
            (trailers, False),
        ]
        for pieces, is_waited_for in batches:
            taken = threading.Event() if is_waited_for else None
            waits += [] if taken is None else [taken]
            queue.add(Batch(pieces, lambda nbytes, is_last: told.append((nbytes, is_last)), taken))
            given_pieces.setdefault(stream_id, []).extend(pieces)
    assert queue.data_nbytes == sum(nbytes for answer in answers for nbytes, *_ in answer)
    sent: dict[int, list[Buffer]] = defaultdict(list)
    for room in itertools.cycle(rooms):
        if not len(queue):
            break
        if (turn := queue.next_turn()) is None:
            queue.window_opened(0)
            turn = queue.next_turn()
        assert turn is not None
        part = queue.take(turn, room, max_frame_size)
        if part is not None:
            assert part.data_nbytes <= room
            assert part.batch.stream_id == turn
            part.was_sent()
            sent[turn] += part.pieces
    assert {stream_id: content_of(pieces, max_frame_size) for stream_id, pieces in sent.items()} == {
        stream_id: content_of(pieces) for stream_id, pieces in given_pieces.items()
    }
    assert queue.data_nbytes == queue.kept_nbytes == 0
    assert all(taken.is_set() for taken in waits)
    assert sum(nbytes for nbytes, _ in told) == sum(map(len, itertools.chain(*sent.values())))
    assert sum(is_last for _, is_last in told) == sum(len(answer) + 1 for answer in answers)


def test_a_header_block_is_sent_at_once() -> None:
    queue = OutboundQueue(KeptAnswers(0))
    pieces = frames.header_block(1, bytes(40_000), frames.END_STREAM)
    queue.add(Batch(pieces, lambda *_: None))
    part = queue.take(1, 0, frames.MIN_FRAME_SIZE)
    assert part is not None
    assert part.pieces == pieces
    assert part.ends_stream
    assert not len(queue)


@pytest.mark.parametrize("room", [0, -1, -(2**31)])
def test_data_waits_for_room_and_an_empty_frame_does_not(room: int) -> None:
    queue = OutboundQueue(KeptAnswers(0))
    queue.add(Batch(data(0, 1, is_joined=True), lambda *_: None))
    queue.add(Batch(data(1, 1, is_joined=True), lambda *_: None))
    assert queue.take(1, room, frames.MIN_FRAME_SIZE) is not None
    assert queue.take(1, room, frames.MIN_FRAME_SIZE) is None


@pytest.mark.parametrize(
    ("room", "sizes"),
    [(1, [1]), (30, [30]), (31, [30]), (70, [30, 30]), (100, [30, 30, 30]), (1000, [30, 30, 30])],
)
def test_data_that_has_room_is_taken_together_in_frames_of_the_largest_size(room: int, sizes: list[int]) -> None:
    queue = OutboundQueue(KeptAnswers(0))
    queue.add(Batch(data(100, 1, is_joined=False), lambda *_: None))
    part = queue.take(1, room, 30)
    assert part is not None
    whole, found = b"".join(part.pieces), []
    while whole:
        found.append(frames.parse_header(whole, 0)[0])
        whole = whole[frames.HEADER_NBYTES + found[-1] :]
    assert found == sizes
    assert part.data_nbytes == sum(sizes)


def test_streams_take_turns() -> None:
    queue = OutboundQueue(KeptAnswers(0))
    for stream_id in (1, 3, 5):
        queue.add(Batch(data(100, stream_id, is_joined=False), lambda *_: None))
    turns = []
    for _ in range(6):
        turn = queue.next_turn()
        assert turn is not None
        assert isinstance(queue.take(turn, 50, frames.MIN_FRAME_SIZE), Part)
        turns.append(turn)
    assert turns == [1, 3, 5, 1, 3, 5]
    assert not len(queue)


@pytest.mark.parametrize("opened", [3, 0])
def test_a_stream_that_waits_for_a_window_has_no_turn_until_it_opens(opened: int) -> None:
    queue = OutboundQueue(KeptAnswers(0))
    for stream_id in (1, 3):
        queue.add(Batch(data(100, stream_id, is_joined=False), lambda *_: None))
    assert queue.next_turn() == 1
    assert queue.next_turn() == 3
    assert queue.take(3, 0, frames.MIN_FRAME_SIZE) is None
    queue.add(Batch(data(100, 3, is_joined=False), lambda *_: None))  # comes after what waits
    assert [queue.next_turn(), queue.next_turn()] == [1, 1]
    queue.window_opened(opened)
    queue.window_opened(5)  # has nothing to send
    assert {queue.next_turn(), queue.next_turn()} == {1, 3}
    queue.withdraw(1)
    queue.withdraw(3)
    assert queue.next_turn() is None


def test_what_is_withdrawn_is_not_sent_and_nothing_waits_for_it() -> None:
    queue = OutboundQueue(KeptAnswers(0))
    taken = threading.Event()
    queue.add(Batch(data(100, 1, is_joined=False), lambda *_: None, taken))
    queue.add(Batch(data(10, 1, is_joined=True), lambda *_: None))
    queue.add(Batch(data(7, 3, is_joined=True), lambda *_: None))
    assert queue.take(1, 40, frames.MIN_FRAME_SIZE) is not None
    assert queue.data_nbytes_of(1) == 70
    assert queue.kept_nbytes == 17 + 2 * frames.HEADER_NBYTES
    queue.withdraw(1)
    assert taken.is_set()
    assert (len(queue), queue.data_nbytes, queue.kept_nbytes) == (1, 7, 7 + frames.HEADER_NBYTES)
