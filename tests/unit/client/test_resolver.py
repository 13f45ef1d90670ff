"""The resolution of targets into addresses."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from tests.servers import wait_until

from bngrad._balancing.resolver import Resolver, lookup

SECONDS = 30.0


@pytest.mark.parametrize("target", ["localhost:1", "dns:///localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/a", "a"])
def test_a_target_with_one_address_resolves_to_itself(target: str) -> None:
    assert lookup(target) == [target]


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
    assert lookup("host:7") == targets


def test_names_are_looked_up_again_but_not_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, told = ["10.0.0.1", "10.0.0.2"], list[list[str]]()
    answers(monkeypatch, addresses)
    resolver = Resolver(["host:7", "unix:/a"])

    resolver.resolve(told.append)
    resolver.first.result(SECONDS)
    addresses[:] = ["10.0.0.3", "10.0.0.2"]
    resolver.resolve(told.append)
    time.sleep(0.05)
    assert told == [["10.0.0.1:7", "10.0.0.2:7", "unix:/a"]]
    monkeypatch.setattr("bngrad._balancing.resolver._BETWEEN_LOOKUPS_S", 0.0)
    resolver.resolve(told.append)
    wait_until(lambda: len(told) == 2)
    addresses.clear()  # the addresses known so far remain
    resolver.resolve(told.append)
    wait_until(lambda: len(told) == 3)
    assert told[1:] == [["10.0.0.3:7", "10.0.0.2:7", "unix:/a"]] * 2


def test_addresses_are_reported_at_once_and_only_once() -> None:
    told: list[list[str]] = []
    resolver = Resolver(["127.0.0.1:1", "unix:/a"])
    for _ in range(3):
        resolver.resolve(told.append)
    assert told == [["127.0.0.1:1", "unix:/a"]]


def test_an_unknown_name_resolves_to_itself() -> None:
    told: list[list[str]] = []
    unknown = f"{'x' * 64}:1"  # too long for a name: no name server is asked, which could take longer than SECONDS
    resolver = Resolver([unknown])
    resolver.resolve(told.append)
    resolver.first.result(SECONDS)
    assert told == [[unknown]]
