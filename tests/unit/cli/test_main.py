"""The command ``bngrad``: its help, its version, and what it says without its extras."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.servers import interruptible
from tests.unit.cli.extras import SERVER_EXTRA, run_without

from bngrad_cli.commands.info import info
from bngrad_cli.main import main as command_line
from bngrad_wire import __version__


@pytest.mark.parametrize("command", ["serve", "config", "demo"])
def test_without_the_server_extra_a_command_of_the_server_says_what_to_install(command: str) -> None:
    ended = run_without("rich", *SERVER_EXTRA, arguments=(command,))
    assert ended.returncode == 1
    hint = "pip install '.[server]' in a checkout of bngrad"
    assert ended.stderr == f"bngrad: this command needs the module pydantic: {hint}\n"


@pytest.mark.parametrize("command", ["check", "info", "bench", "advise", "top", "token", "completion"])
def test_other_commands_need_neither_the_server_nor_its_extra(command: str) -> None:
    ended = run_without(*SERVER_EXTRA, "bngrad_server", arguments=(command, "--help"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"Usage: bngrad {command} ")
    assert ended.stdout.endswith("\n\n")  # the line of the server's modules is empty


@pytest.mark.parametrize("command", ["bench", "advise", "top"])
def test_without_the_cli_extra_a_command_says_what_to_install(command: str) -> None:
    ended = run_without("rich", *SERVER_EXTRA, arguments=(command,))
    assert ended.returncode == 1
    hint = "pip install '.[cli]' in a checkout of bngrad"
    assert ended.stderr == f"bngrad: this command needs the module rich: {hint}\n"


@pytest.mark.parametrize("command", ["check", "info", "token", "completion"])
def test_the_clients_packages_are_enough_for_a_command(command: str) -> None:
    ended = run_without("rich", *SERVER_EXTRA, "bngrad_server", arguments=(command, "--help"))
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("value", ["", "1"])
def test_no_color_in_the_environment_leaves_out_colours_on_a_terminal(value: str) -> None:
    command = [sys.executable, "-m", "bngrad_cli", "check", "--quick", "unix:/no/such/socket"]
    terminal, slave = os.openpty()
    with os.fdopen(terminal, "rb", 0) as shown:
        ended = subprocess.run(command, env={**os.environ, "NO_COLOR": value}, stdout=slave, stderr=slave)
        os.close(slave)
        assert (ended.returncode, b"\x1b[" in shown.read(4096)) == (1, value == "")


@pytest.mark.parametrize("arguments", [("--help",), ("config",), ("config", "--json"), ("token", "new", "alice")])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_disk_is_reported_in_one_line(arguments: tuple[str, ...], buffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "bngrad_cli", *arguments]
        ended = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "bngrad: cannot write the output: No space left on device\n")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "no memory"),
        (MemoryError("Unable to allocate 24.5 MiB"), "Unable to allocate 24.5 MiB"),
        (OSError(errno.EMFILE, "Too many open files"), "[Errno 24] Too many open files"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (ImportError("libtorch_cpu.so: failed to map segment"), "libtorch_cpu.so: failed to map segment"),
    ],
)
def test_what_the_system_does_not_give_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(**arguments: object) -> None:
        raise error

    monkeypatch.setattr(info, "callback", fail)
    ended = CliRunner().invoke(command_line, ["info"])
    assert ended.exit_code == 1
    assert ended.output == f"Error: the system does not give what the command needs, see ulimit -a: {reason}\n"


def test_a_reader_that_has_gone_is_no_error_to_report() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "bngrad_cli", "config", "--json"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_an_error_is_not_printed_elsewhere_when_stderr_is_closed() -> None:
    command = f"{sys.executable} -m bngrad_cli nothing 2>&-"
    ended = subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_ctrl_c_ends_a_command_with_its_exit_code_and_no_message(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/socket")
        listening.listen()
        command = [sys.executable, "-m", "bngrad_cli", "check", "--quick", f"unix:{tmp_path}/socket"]
        with interruptible(command, stderr=subprocess.PIPE) as process:
            listening.accept()[0].close()  # the command runs, and waits for an answer to its next connection
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "")


def test_ctrl_c_amid_the_imports_prints_no_traceback() -> None:
    code = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from bngrad_cli.__main__ import main
main()
"""
    with interruptible([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_amid_the_import_of_a_module_of_cython_has_its_exit_code_and_no_message() -> None:
    code = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "grpc":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("cannot initialise module strings") from None
sys.meta_path.insert(0, Interrupt())
sys.argv = ["bngrad", "info", "localhost:1"]
from bngrad_cli.__main__ import main
main()
"""
    with interruptible([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


def test_a_narrow_terminal_has_the_names_of_all_settings() -> None:
    command = [sys.executable, "-m", "bngrad_cli", "config"]
    ended = subprocess.run(command, env={**os.environ, "COLUMNS": "40"}, capture_output=True, text=True, check=True)
    assert "max_client_requests" in ended.stdout
    assert "…" not in ended.stdout


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(command_line, ["--version"]).output == f"bngrad, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--thread", "1"], "--threads"),
        (["serve", "x"], "unexpected"),
        (
            ["info", "--timeout", "nan"],
            "Invalid value for '--timeout': it should be a number of seconds, above 0 and at most 604800, not 'nan'",
        ),
        (["check", "--timeout", "inf"], "at most 604800, not 'inf'"),
        (["check", "--timeout", "1e300"], "at most 604800, not '1e300'"),
        (
            ["bench", "--seconds", "nan"],
            "Invalid value for '--seconds': it should be a number of seconds, above 0 and at most 604800, not 'nan'",
        ),
        (["top", "--interval", "inf"], "at least 0.1 and at most 604800, not 'inf'"),
        (["check", "--quick", "--long"], "--quick and --long exclude each other"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(command_line, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_help_lists_each_command_with_the_first_line_of_its_own_help() -> None:
    context = click.Context(command_line)
    lines = [line.split(maxsplit=1) for line in CliRunner().invoke(command_line, ["--help"]).output.splitlines()]
    listed = {line[0]: line[1] for line in lines if len(line) == 2}
    for name in command_line.list_commands(context):
        command = command_line.get_command(context, name)
        assert command is not None
        assert (command.help or "").splitlines()[0] == listed[name]
