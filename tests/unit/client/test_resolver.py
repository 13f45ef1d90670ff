"""Targets, names, and what they stand for."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

import bngrad
from bngrad._balancing.resolver import Resolver, lookup
from bngrad._validation import check_targets, host_and_port_of

SECONDS = 30.0


@pytest.mark.parametrize(
    ("target", "targets"),
    [
        ("a:1", ["a:1"]),
        (["a:1"], ["a:1"]),
        (("a:1", "unix:/b", "a:1"), ["a:1", "unix:/b"]),
        (["dns:///a:1", "[::1]:2"], ["dns:///a:1", "[::1]:2"]),
    ],
)
def test_one_target_or_several(target: Any, targets: list[str]) -> None:
    assert check_targets(target) == targets


@pytest.mark.parametrize("target", [None, 5, b"a:1", {"a:1"}, ["a:1", None], [b"a:1"], [["a:1"]]])
def test_targets_are_strings(target: Any) -> None:
    with pytest.raises(TypeError, match="target must be a str, not "):
        check_targets(target)


@pytest.mark.parametrize(
    "target",
    [
        *([], "", ["a:1", ""], ["http://a:1"], "localhost", "a:0", "a:65536", ":", ":1", "a:", "a:b", "a:-1", "a:1.5"),
        *("a b:1", "a:1\n", "::1:1", "[::1]", "a:\u0661", "\ud800:1", "a\0:1", "nobody:/a", "a:" + "9" * 5000),
        *("unix:", "unix:///", "unix-abstract:", "dns:", "unix:/\ud800", "unix:/a\0b", "unix:/" + "a" * 107),
    ],
)
def test_targets_name_servers(target: Any) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="target must ") as refused:
        check_targets(target)
    assert refused.value.violations[0].field == "target"


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("a:1", ("a", 1)),
        ("dns:a:1", ("a", 1)),
        ("dns:///a.b:1", ("a.b", 1)),
        ("[::1]:2", ("::1", 2)),
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("a", None),
        ("unix:/a:1", None),
        ("unix:a", None),
        ("ipv4:127.0.0.1:1", None),
        ("dns://8.8.8.8/a:1", None),
    ],
)
def test_host_and_port(target: str, place: tuple[str, int] | None) -> None:
    assert host_and_port_of(target) == place


@pytest.mark.parametrize("target", ["localhost:1", "dns:///localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/a", "a"])
def test_what_has_one_address_stands_for_itself(target: str) -> None:
    assert lookup(target) == [target]


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 64])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(OSError, match=r"[Nn]ame"):
        lookup(f"{name}:1")


def answers(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """Has names stand for these addresses, which may change; it takes the place of a name server."""

    def getaddrinfo(host: str, *options: object, **names: object) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_AGAIN, "nobody can be asked")
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses]
        return [
            (family, socket.SOCK_STREAM, 6, "", (each, 0)) for family, each in zip(families, addresses, strict=True)
        ]

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
def test_a_name_of_several_addresses_stands_for_each(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], targets: list[str]
) -> None:
    answers(monkeypatch, addresses)
    assert lookup("host:7") == targets


def test_names_are_asked_for_again_but_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, told = ["10.0.0.1", "10.0.0.2"], list[list[str]]()
    answers(monkeypatch, addresses)
    resolver = Resolver(["host:7", "unix:/a"])

    def wait(number: int) -> None:
        until = time.monotonic() + SECONDS
        while len(told) < number and time.monotonic() < until:
            time.sleep(0.001)

    resolver.resolve(told.append)
    resolver.first.result(SECONDS)
    addresses[:] = ["10.0.0.3", "10.0.0.2"]
    resolver.resolve(told.append)
    time.sleep(0.05)
    assert told == [["10.0.0.1:7", "10.0.0.2:7", "unix:/a"]]
    monkeypatch.setattr("bngrad._balancing.resolver._BETWEEN_LOOKUPS_S", 0.0)
    resolver.resolve(told.append)
    wait(2)
    addresses.clear()  # what was known stays
    resolver.resolve(told.append)
    wait(3)
    assert told[1:] == [["10.0.0.3:7", "10.0.0.2:7", "unix:/a"]] * 2


def test_addresses_are_told_at_once_and_only_once() -> None:
    told: list[list[str]] = []
    resolver = Resolver(["127.0.0.1:1", "unix:/a"])
    for _ in range(3):
        resolver.resolve(told.append)
    assert told == [["127.0.0.1:1", "unix:/a"]]


def test_an_unknown_name_stands_for_itself() -> None:
    told: list[list[str]] = []
    unknown = f"{'x' * 64}:1"  # to every host: no name server need be asked, which may take longer than SECONDS
    resolver = Resolver([unknown])
    resolver.resolve(told.append)
    resolver.first.result(SECONDS)
    assert told == [[unknown]]
