"""Names with control characters, in the log and in `bngrad top`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from tests.monitoring.conftest import HTTP, http_of
from tests.security.conftest import Guarded, ask
from tests.servers import Transport, wait_until

import bngrad
from bngrad_cli.main import main as command_line

FORGED = "2026-01-01 00:00:00,000 ERROR all is lost"
NAME = f"eve\r\n{FORGED}\x1b[2J"
ESCAPED = rf"certificate eve\r\n{FORGED}\x1b[2J"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server that knows clients by their certificates alone, and logs for people."""
    guarded = Guarded(tmp_path_factory.mktemp("forged"), options=HTTP)
    at = guarded.options.index("--token-file")
    guarded.options = guarded.options[:at] + guarded.options[at + 2 :]
    with guarded.running():
        yield guarded


@pytest.mark.parametrize("transport", ["unary", "stream"])
def test_the_name_in_a_certificate_forges_no_line_and_controls_no_terminal(
    server: Guarded, transport: Transport
) -> None:
    pair = server.authority.issue("eve@work.example", common_name=NAME)
    tls = bngrad.Tls(server.authority.path, pair.certificate, pair.key)
    before = server.server.stderr().count(ESCAPED)
    with (
        bngrad.Client(server.server.target, transport=transport, tls=tls) as client,
        pytest.raises(bngrad.InvalidArgumentError),
    ):
        ask(client, epsilon=-1.0)
    wait_until(lambda: server.server.stderr().count(ESCAPED) > before)
    assert all(line.isprintable() for line in server.server.stderr().split("\n"))
    assert FORGED not in [line.strip() for line in server.server.stderr().splitlines()]


def test_top_shows_the_name_escaped(server: Guarded) -> None:
    pair = server.authority.issue("eve@work.example", common_name=NAME)
    tls = bngrad.Tls(server.authority.path, pair.certificate, pair.key)
    with (
        bngrad.Client(server.server.target, tls=tls, transport="unary") as client,
        pytest.raises(bngrad.InvalidArgumentError),
    ):
        ask(client, epsilon=-1.0)
    address = http_of(server.server).removeprefix("http://")

    def shown() -> str:
        return CliRunner(env={"COLUMNS": "400"}).invoke(command_line, ["top", address, "--once"]).output

    wait_until(lambda: ESCAPED in shown(), poll_s=0.3)
    assert "\x1b" not in shown()
