"""Questions for the status, over a real socket; a thread or the test answers in place of the front process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bngrad_server.monitor import status_client
from bngrad_server.monitor.status_client import FrontGoneError, StatusClient

TIMEOUT_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(TIMEOUT_S)
    with ours, theirs:
        yield ours, theirs


def answer(sock: socket.socket, number: int) -> None:
    assert sock.recv(10) == b"?"
    sock.send(b'{"number": %d}' % number)


def answer_all(sock: socket.socket, numbers: Iterable[int]) -> None:
    for number in numbers:
        answer(sock, number)


def test_requests_that_come_meanwhile_share_a_question_even_if_the_first_is_given_up(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    async def ask() -> list[dict[str, int]]:
        client = StatusClient(ends[0])
        first, *others = (asyncio.create_task(client.status()) for _ in range(21))
        await asyncio.sleep(0)
        first.cancel()
        return list(await asyncio.gather(*others))

    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(answer, ends[1], 1)
        assert asyncio.run(ask()) == [{"number": 1}] * 20
        answered.result()
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)


@pytest.mark.parametrize(("fresh_s", "numbers"), [(TIMEOUT_S, [1, 1]), (0.0, [1, 2])])
def test_an_answer_is_given_again_while_it_is_fresh(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, fresh_s: float, numbers: list[int]
) -> None:
    async def ask() -> list[int]:
        client = StatusClient(ends[0])
        first = await client.status()
        monkeypatch.setattr(status_client, "_FRESH_S", fresh_s)
        return [first["number"], (await client.status())["number"]]

    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(answer_all, ends[1], dict.fromkeys(numbers))
        assert asyncio.run(ask()) == numbers
        answered.result()


def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_question(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> dict[str, int]:
        client = StatusClient(ends[0])
        monkeypatch.setattr(status_client, "_TIMEOUT_S", 0.05)
        with pytest.raises(TimeoutError):
            await client.status()
        answer(ends[1], 1)
        monkeypatch.setattr(status_client, "_TIMEOUT_S", TIMEOUT_S)
        answered = asyncio.get_running_loop().run_in_executor(None, answer, ends[1], 2)
        status = await client.status()
        await answered
        return status

    assert asyncio.run(ask()) == {"number": 2}


@pytest.mark.parametrize("has_heard", [False, True])
def test_a_front_process_that_has_gone_is_an_error_at_once(
    ends: tuple[socket.socket, socket.socket], has_heard: bool
) -> None:
    def go() -> None:
        if has_heard:
            ends[1].recv(10)
        ends[1].close()

    async def ask() -> None:
        gone = asyncio.get_running_loop().run_in_executor(None, go)
        if not has_heard:
            await gone
        with pytest.raises(FrontGoneError):
            await StatusClient(ends[0]).status()
        await gone

    asyncio.run(ask())
