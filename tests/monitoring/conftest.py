"""Real servers with an HTTP port, and helpers that read it."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.servers import Transport, wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer

TENSOR, STATS = np.ones((2, 3, 3, 4), np.float32), np.ones(4, np.float32)
HTTP = ("--http", "127.0.0.1:0")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def get(url: str, *, timeout: float = 30, **headers: str) -> Answer:
    """Fetches a URL, whatever its status."""
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - our own server's
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return Answer(answer.status, dict(answer.headers), answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read().decode())


def http_of(server: EmbeddedServer) -> str:
    """Returns the URL of a server's HTTP port, from its log."""

    def addresses() -> list[str]:
        return re.findall(r"HTTP: (\S+:\d+)", server.stderr())

    wait_until(lambda: bool(addresses()))
    return f"http://{addresses()[0]}"


def status_of(http: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(get(f"{http}/status.json").text)
    return status


def samples(http: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Returns every sample by its name and label values, ordered by label name.

    Like a scraper, it asks again while the front process does not answer within the 4 s that a page waits for it: that
    happens on a machine that is short of memory.
    """
    answers: list[Answer] = []

    def is_answered() -> bool:
        answers.append(get(f"{http}/metrics"))
        return answers[-1].status == 200

    wait_until(is_answered)
    text = answers[-1].text
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def call(client: bngrad.Client, **attributes: Any) -> None:
    client.fused_batch_norm_grad_v2(TENSOR, TENSOR, STATS, STATS, STATS, **attributes)


def call_by_every_transport(server: EmbeddedServer) -> None:
    """Makes three valid calls and an invalid one over each transport."""
    transports: tuple[Transport, ...] = ("unary", "stream", "shared")
    for transport in transports:
        with bngrad.Client(server.target, transport=transport) as client:
            for _ in range(3):
                call(client)
            with pytest.raises(bngrad.InvalidArgumentError):
                call(client, epsilon=-1.0)


def tool(name: str) -> str:
    """Returns the path of a program; skips the test if it is missing, unless BNGRAD_REQUIRE_MONITORING is set."""
    path = shutil.which(name)
    if path is None and not os.environ.get("BNGRAD_REQUIRE_MONITORING"):
        pytest.skip(f"{name} is not installed")
    assert path is not None, f"{name} must be installed"
    return path


@pytest.fixture(scope="session")
def watched() -> Iterator[EmbeddedServer]:
    """A server with an HTTP port that has had every kind of call, for tests that leave it unchanged."""
    with EmbeddedServer(options=HTTP) as server:
        call_by_every_transport(server)
        http = http_of(server)
        wait_until(lambda: sum(row[-1] for row in status_of(http)["server"]["requests"]) == 12)
        yield server


@pytest.fixture(scope="session")
def http(watched: EmbeddedServer) -> str:
    return http_of(watched)
