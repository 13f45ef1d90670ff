"""The resolution of targets into addresses."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from tests.clock import Clock
from tests.servers import wait_until
from tests.unit.client.calls import START_THREAD, interrupt_after, interrupt_at, no_thread

import bngrad
from bngrad._balancing import resolver as resolver_module
from bngrad._balancing.resolver import Resolver, lookup
from bngrad._validation import check_targets
from bngrad.typing import Targets

SECONDS = 30.0


@pytest.mark.parametrize(
    "target", ["localhost:1", "dns:///localhost:1", "127.0.0.1:1", "[::1]:1", "[fe80::1%lo]:1", "unix:/a", "a"]
)
def test_a_target_with_one_address_resolves_to_itself(target: str) -> None:
    assert [address.target for address in lookup(target)] == [target]


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 64])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(OSError, match=r"[Nn]ame"):
        lookup(f"{name}:1")


def answers(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """Resolves names to these addresses, which may change, in place of a name server."""

    def getaddrinfo(host: str, *options: object, **names: object) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses]
        return [(kind, socket.SOCK_STREAM, 6, "", (each, 0)) for kind, each in zip(families, addresses, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("addresses", "targets"),
    [
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.1:7", "10.0.0.2:7"]),
        (["fd00::1", "fd00::2", "10.0.0.1"], ["[fd00::1]:7", "[fd00::2]:7"]),
        (["10.0.0.1", "10.0.0.1"], ["host:7"]),
        (["fd00::1", "10.0.0.1"], ["host:7"]),
    ],
)
def test_a_name_with_several_addresses_resolves_to_each(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], targets: list[str]
) -> None:
    answers(monkeypatch, addresses)
    found = lookup("host:7")
    assert [address.target for address in found] == targets
    assert {address.hostname for address in found} == {None if targets == ["host:7"] else "host"}  # for certificates


def test_a_name_whose_only_address_changes_stands_for_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, addresses := ["10.0.0.1"])
    (before,) = lookup("host:7")
    addresses[:] = ["10.0.0.2"]
    (after,) = lookup("host:7")
    assert before.target == after.target == "host:7"
    assert before != after


def resolver_of(targets: Targets, told: list[list[str]]) -> Resolver:
    return Resolver(
        [targets] if isinstance(targets, str) else targets,
        check_targets,
        lambda addresses: told.append([address.target for address in addresses]),
    )


def test_names_are_looked_up_again_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, told = ["10.0.0.1", "10.0.0.2"], list[list[str]]()
    answers(monkeypatch, addresses)
    resolver = resolver_of(["host:7", "unix:/a"], told)
    assert time.monotonic() >= resolver.due_at

    resolver.resolve().result(SECONDS)
    assert 3 < resolver.due_at - time.monotonic() <= 6
    resolver.failed()  # after a failure it is sooner
    assert resolver.due_at - time.monotonic() <= 1
    addresses[:] = ["10.0.0.3", "10.0.0.2"]
    resolver.resolve().result(SECONDS)
    addresses.clear()  # the addresses known so far remain
    resolver.resolve().result(SECONDS)
    assert told == [["10.0.0.1:7", "10.0.0.2:7", "unix:/a"], *[["10.0.0.3:7", "10.0.0.2:7", "unix:/a"]] * 2]


@pytest.mark.parametrize(("interval_s", "due_in_s"), [(6.0, 1.0), (0.5, 0.5)])
def test_after_a_failure_the_next_look_up_is_due_a_second_after_the_last_one_at_most(
    interval_s: float, due_in_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(resolver_module, "time", clock)
    monkeypatch.setattr(resolver_module, "_LONGEST_INTERVAL_S", interval_s)
    monkeypatch.setattr(resolver_module, "_JITTER", 0.0)
    resolver = resolver_of(lambda: ["unix:/a"], [])
    began_at = clock.now
    resolver.resolve().result(SECONDS)
    for _ in range(2):
        clock.now += 0.25
        resolver.failed()
        assert resolver.due_at == began_at + due_in_s


def test_two_targets_of_one_name_stand_for_each_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    answers(monkeypatch, ["10.0.0.1", "10.0.0.2"])
    resolver_of(["host:7", "dns:///host:7"], told).resolve().result(SECONDS)
    assert told == [["10.0.0.1:7", "10.0.0.2:7"]]


def test_one_look_up_is_under_way_at_a_time() -> None:
    held, told = threading.Event(), list[list[str]]()

    def targets() -> list[str]:
        held.wait(SECONDS)
        return ["unix:/a"]

    resolver = resolver_of(targets, told)
    lookups = [resolver.resolve() for _ in range(3)]
    held.set()
    for each in lookups:
        each.result(SECONDS)
    assert told == [["unix:/a"]]


def test_the_caller_looks_up_where_the_system_has_no_thread_for_it() -> None:
    told: list[list[str]] = []
    resolver = resolver_of(lambda: ["unix:/a"], told)
    with no_thread("bngrad-lookup"):
        resolver.resolve().result(0)
    resolver.resolve().result(SECONDS)
    assert told == [["unix:/a"]] * 2


def test_a_look_up_that_is_interrupted_ends() -> None:
    was_interrupted, told = False, list[list[str]]()

    def targets() -> list[str]:
        nonlocal was_interrupted
        if not was_interrupted:
            was_interrupted = True
            raise KeyboardInterrupt
        return ["unix:/a"]

    resolver = resolver_of(targets, told)
    with no_thread("bngrad-lookup"), pytest.raises(KeyboardInterrupt):
        resolver.resolve()
    resolver.resolve().result(SECONDS)
    assert told == [["unix:/a"]]


def test_a_look_up_that_an_interrupt_kept_from_beginning_ends_no_later_one() -> None:
    may_end, threads = [threading.Event() for _ in range(2)], list[threading.Thread]()

    def targets() -> list[str]:
        threads.append(threading.current_thread())
        may_end[len(threads) - 1].wait(SECONDS)
        return ["unix:/a"]

    resolver = resolver_of(targets, [])
    with interrupt_after(START_THREAD, module="threading"):
        resolver.resolve()
    wait_until(lambda: len(threads) == 1)
    later = resolver.resolve()
    may_end[0].set()
    threads[0].join(SECONDS)
    assert resolver.resolve() is later
    may_end[1].set()
    later.result(SECONDS)


@pytest.mark.parametrize("targets", ["unix:/a", lambda: ["unix:/a"]], ids=["static", "function"])
def test_after_an_interrupt_at_any_step_a_look_up_ends(targets: Targets) -> None:
    for step in itertools.count():
        resolver = resolver_of(targets, [])
        is_over = not interrupt_at(step, resolver.resolve)
        with suppress(bngrad.UnavailableError):  # that of the call which was interrupted
            resolver.resolve().result(SECONDS)
        resolver.resolve().result(SECONDS)
        if is_over:
            break
    assert step > 2


def test_a_function_that_fails_is_logged_once_and_its_last_targets_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Any] = [ValueError("not yet"), ["unix:/a"], OSError("gone"), [], ["a b"], ["unix:/b"]]
    told: list[list[str]] = []

    def targets() -> list[str]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    resolver = resolver_of(targets, told)
    with pytest.raises(bngrad.UnavailableError, match="the function that returns the targets failed: not yet"):
        resolver.resolve().result(SECONDS)
    for _ in range(5):
        resolver.resolve().result(SECONDS)
    assert told == [["unix:/a"]] * 4 + [["unix:/b"]]
    assert [record.message for record in caplog.records] == [
        "the function that returns the targets failed; the last ones are kept: gone"
    ]


def test_addresses_are_never_looked_up() -> None:
    told: list[list[str]] = []
    resolver = resolver_of(["127.0.0.1:1", "unix:/a"], told)
    resolver.resolve().result(0)
    resolver.failed()
    assert resolver.due_at == math.inf
    assert told == [["127.0.0.1:1", "unix:/a"]]


def test_an_unknown_name_resolves_to_itself() -> None:
    told: list[list[str]] = []
    unknown = f"{'x' * 64}:1"  # too long for a name: no name server is asked, which could take longer than SECONDS
    resolver_of([unknown], told).resolve().result(SECONDS)
    assert told == [[unknown]]
