"""The command ``bngrad``."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner

from bngrad_cli import __main__
from bngrad_cli.main import main as command_line
from bngrad_wire import __version__


@pytest.mark.parametrize("module", ["click", "pydantic"])
def test_without_the_server_extra_the_command_says_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("bngrad_cli") and name != __main__.__name__]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["bngrad", "serve", "--help"])
    with pytest.raises(SystemExit, match=rf"no module {module}; .*: pip install 'bngrad\[server\]'"):
        __main__.main()


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(command_line, ["--version"]).output == f"bngrad, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--thread", "1"], "--threads"),
        (["x"], "unexpected"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command_line, ["serve", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_help_tells_of_each_command_what_its_own_help_begins_with() -> None:
    context = click.Context(command_line)
    lines = [line.split(maxsplit=1) for line in CliRunner().invoke(command_line, ["--help"]).output.splitlines()]
    told = {line[0]: line[1] for line in lines if len(line) == 2}
    for name in command_line.list_commands(context):
        command = command_line.get_command(context, name)
        assert command is not None
        assert (command.help or "").splitlines()[0] == told[name]
