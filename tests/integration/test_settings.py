"""Settings from file, environment and flags reach a real server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import bngrad

COMMAND = (sys.executable, "-m", "bngrad_cli", "serve")
CPU = ("--device", "cpu", "--listen", "127.0.0.1:0", "--workers", "1")


def test_a_server_uses_settings_of_file_environment_and_flags(tmp_path: Path) -> None:
    file, socket = tmp_path / "bngrad.toml", tmp_path / "bngrad.sock"
    file.write_text('workers = 3\narena_bytes = "32MiB"\nmax_message_bytes = "4MiB"\n')
    environment = {**os.environ, "BNGRAD_CONFIG": str(file), "BNGRAD_WORKERS": "1", "BNGRAD_LISTEN": f"unix:{socket}"}
    arguments = [*COMMAND, "--device", "cpu", "--arena-bytes", "16MiB"]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f" ready on unix:{socket}: " in process.stdout.readline()
        with bngrad.Client(f"unix:{socket}") as client:
            info = client.server_info()
        process.terminate()
    assert process.returncode == 0
    assert (len(info.devices), info.arena_bytes, info.max_message_bytes) == (1, 2**24, 2**22)


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        ((), {"BNGRAD_WORKERS": "none"}, "Error: BNGRAD_WORKERS is 'none'; it should be a whole number"),
        (("--config", "/nowhere"), {}, "Error: cannot read settings from /nowhere: there is no such file"),
    ],
)
def test_a_server_does_not_start_with_an_impossible_setting(
    arguments: tuple[str, ...], environment: dict[str, str], complaint: str
) -> None:
    ended = subprocess.run([*COMMAND, *arguments], env={**os.environ, **environment}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(complaint)
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [[*COMMAND, *CPU], [*COMMAND[:-1], "config"]], ids=["serve", "config"])
@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (("--shared-group", "nobodys"), {}, "--shared-group is 'nobodys'; it should be a group of this host"),
        (
            (),
            {"BNGRAD_TOKEN_FILE": "/nowhere"},
            "BNGRAD_TOKEN_FILE is '/nowhere'; it should be a file that can be read: No such file or directory",
        ),
    ],
)
def test_a_setting_that_this_host_cannot_use_is_as_wrong_as_others(
    command: list[str], arguments: tuple[str, ...], environment: dict[str, str], complaint: str
) -> None:
    environment = {**os.environ, **environment}
    ended = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"Error: {complaint}\n")


def test_a_server_that_may_open_too_few_files_says_so() -> None:
    command = ["prlimit", "--nofile=32:32", *COMMAND, *CPU]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    expected = "the system does not give what a server needs, see ulimit -a: [Errno 24] a server needs 256 open files"
    assert ended.stderr.startswith(f"Error: {expected}, and may have 32")


def test_a_server_that_may_make_no_file_of_the_size_of_its_arena_says_so() -> None:
    command = ["prlimit", f"--fsize={2**20}", *COMMAND, *CPU]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    expected = "Error: the system does not give what a server needs, see ulimit -a: [Errno 27] File too large"
    assert ended.stderr.startswith(expected)


@pytest.mark.parametrize("megabytes", [400, 800])
def test_a_server_that_has_too_little_address_space_says_so(megabytes: int) -> None:
    command = ["prlimit", f"--as={megabytes * 1024**2}", *COMMAND, *CPU]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Error: the system does not give what a server needs, see ulimit -a: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_that_is_taken_is_no_wrong_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run([*COMMAND, "--listen", address], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.endswith(f"Error: cannot listen on {address}: Address already in use\n")
