"""The commands of ``pip install '.[cli]'`` against a real server, without the server's packages."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.servers import wait_until
from tests.unit.cli.extras import SERVER_EXTRA, run_without

from bngrad_cli.embedded import EmbeddedServer


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(options=("--workers", "1", "--http", "127.0.0.1:0")) as server:
        yield server


@pytest.mark.parametrize(
    "command",
    [
        "check --timeout 100 TARGET",
        "check --quick --timeout 100 TARGET",
        "info --timeout 100 TARGET",
        "bench --seconds 0.01 --layer tiny TARGET",
        "top --once HTTP",
        "token new alice",
        "completion bash",
    ],
)
def test_a_command_runs_without_the_servers_packages(server: EmbeddedServer, command: str) -> None:
    wait_until(lambda: re.search(r"HTTP: \S+:\d+", server.stderr()))  # logged after the server is ready
    (http,) = re.findall(r"HTTP: (\S+:\d+)", server.stderr())
    arguments = command.replace("TARGET", server.target).replace("HTTP", http).split()
    ended = run_without(*SERVER_EXTRA, "bngrad_server", arguments=tuple(arguments))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("\n\n")  # no module of the server was imported
