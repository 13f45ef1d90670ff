"""Outputs of failed calls: how long they stay in quarantine, and what the server is asked for that."""

from __future__ import annotations

import errno
import itertools
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from unittest import mock

import numpy as np
import pytest
from tests.servers import wait_until
from tests.unit.client.calls import SECONDS, interrupt_at

from bngrad._deadline import ENDLESS, Cancellation
from bngrad._shared_memory import region as region_module
from bngrad._shared_memory.quarantine import AbandonedCall, Output, Quarantine, stop_reading
from bngrad._shared_memory.region import PoolRegion
from bngrad_wire.lease_protocol import IN_USE, NOT_IN_USE

NBYTES = 4096


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    far.settimeout(10.0)
    with near, far:
        yield near, far


@pytest.fixture
def region(pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> PoolRegion:
    """A region whose server is the other end of the pair."""
    monkeypatch.setattr(region_module, "_ANSWER_TIMEOUT_S", 0.05)
    file = FileIO(os.memfd_create("region"), "r+")
    file.truncate(NBYTES)
    near = pair[0]
    near.setblocking(False)
    return PoolRegion(NBYTES, (near, b"key", file))


def test_a_region_counts_as_in_use_until_the_server_answers_the_last_question(
    region: PoolRegion, pair: tuple[socket.socket, socket.socket]
) -> None:
    _, server = pair
    assert region.is_in_use()
    server.send(NOT_IN_USE)  # late: only what it answers to the next question counts
    assert region.is_in_use()
    server.send(NOT_IN_USE * 2)
    assert not region.is_in_use()
    server.send(IN_USE)
    assert region.is_in_use()
    server.send(NOT_IN_USE)
    assert not region.is_in_use()
    assert region.is_alive


def test_an_interrupt_at_any_step_of_the_question_ends_no_lease_and_mistakes_no_answer(
    region: PoolRegion, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "_ANSWER_TIMEOUT_S", SECONDS)
    answer = IN_USE

    def serve() -> None:
        while pair[1].recv(1):
            pair[1].send(answer)

    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(serve)
        for step in itertools.count():
            answer = IN_USE
            is_over = not interrupt_at(step, region.is_in_use)
            assert region.is_in_use()
            answer = NOT_IN_USE
            wait_until(lambda: not region.is_in_use())
            assert region.is_alive
            if is_over:
                break
        assert step > 5
        region.close()
        served.result(SECONDS)


def test_a_region_is_alive_while_another_thread_waits_for_an_answer(
    region: PoolRegion, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "_ANSWER_TIMEOUT_S", 0.5)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(region.is_in_use)
        pair[1].recv(1)
        assert region.is_alive
        assert asked.result(SECONDS)


def test_a_region_of_a_server_that_has_gone_is_not_in_use(
    region: PoolRegion, pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[1].close()
    assert not region.is_in_use()
    assert not region.is_alive


def test_a_lease_ends_although_a_forked_child_holds_its_socket(
    region: PoolRegion, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, server = pair
    with near.dup():
        region.close()
        assert server.recv(1) == b""


def test_an_output_leaves_once_the_call_is_over_and_then_no_request_names_its_region() -> None:
    quarantine, region, call, output = Quarantine(), mock.Mock(), mock.Mock(), np.zeros(4)
    call.is_over.return_value, region.is_in_use.return_value = False, False
    quarantine.outputs.append(Output(output, region, call))
    assert quarantine.release([output]) is output
    region.is_in_use.assert_not_called()  # a request that the server has not read yet names it later
    call.is_over.return_value, region.is_in_use.return_value = True, True
    assert quarantine.release([output]) is output
    region.is_in_use.return_value = False
    assert quarantine.release([output]) is None
    region.close.assert_called_once()


class Sleeps(Cancellation):
    """Records how long a wait is, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)


def test_a_wait_looks_again_and_again_until_the_output_has_left_or_the_call_is_cancelled() -> None:
    quarantine, call, output, sleeps = Quarantine(), mock.Mock(), np.zeros(4), Sleeps()
    call.is_over.side_effect = lambda: len(sleeps.seconds) == 20
    quarantine.outputs.append(Output(output, PoolRegion(NBYTES, None), call))
    assert quarantine.wait([np.zeros(4)], ENDLESS, sleeps)
    assert not sleeps.seconds
    assert quarantine.wait([output[1:]], ENDLESS, sleeps)
    assert (sleeps.seconds[0], max(sleeps.seconds)) == (0.001, 0.1)

    sleeps.cancel()
    call.is_over.side_effect = lambda: len(sleeps.seconds) == 30
    quarantine.outputs.append(Output(output, PoolRegion(NBYTES, None), call))
    assert not quarantine.wait([output], ENDLESS, sleeps)


def test_memory_that_cannot_be_mapped_ends_its_lease(pair: tuple[socket.socket, socket.socket]) -> None:
    near, server = pair
    file = FileIO("/dev/null")
    with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
        PoolRegion(NBYTES, (near, b"key", file))
    assert server.recv(1) == b""
    assert file.closed


def test_an_interrupt_at_any_step_releases_no_region_twice() -> None:
    for step in itertools.count():
        quarantine, region = Quarantine(), PoolRegion(NBYTES, None)
        for _ in range(2):
            region.hold()
            quarantine.outputs.append(Output(np.zeros(4), region, AbandonedCall()))
        is_over = not interrupt_at(step, lambda: quarantine.release([]))  # noqa: B023 - it is called here
        quarantine.release([])
        assert quarantine.is_empty
        assert region._holders >= 1
        if is_over:
            break
    assert step > 10


def test_a_closed_quarantine_keeps_nothing() -> None:
    quarantine, region, call = Quarantine(), mock.Mock(), mock.Mock()
    quarantine.outputs.append(Output(np.zeros(4), region, call))
    quarantine.close()
    assert quarantine.is_empty
    quarantine.outputs.append(Output(np.zeros(4), region, call))
    quarantine.extended()
    assert quarantine.is_empty
    assert region.close.call_count == call.close.call_count == 2


@pytest.mark.parametrize("stopped", [False, True], ids=["", "after the end of reading"])
def test_an_abandoned_call_is_over_once_the_server_has_closed_its_end(
    pair: tuple[socket.socket, socket.socket], stopped: bool
) -> None:
    near, server = pair
    if stopped:
        stop_reading(near)
    call = AbandonedCall()
    call.abandon(near)
    for _ in range(3):
        assert not call.is_over()
    assert len(server.recv(100)) == (17 if stopped else 0)  # one PING, or the end
    server.close()
    assert call.is_over()
    assert near.fileno() < 0


def test_a_call_that_nothing_told_the_server_to_end_is_over_once_it_has_ended(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Ctrl-C has come before the call was abandoned."""
    near, server = pair
    call = AbandonedCall()
    call.begin(near)
    assert not call.is_over()
    assert server.recv(1) == b""
    server.close()
    assert call.is_over()


def test_a_call_whose_connection_was_closed_is_over(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair
    near.close()
    call = AbandonedCall()
    call.abandon(near)
    assert call.is_over()
