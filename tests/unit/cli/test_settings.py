"""Settings from flags, the environment and files, as ``bngrad config`` prints them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.permissions import denied
from tests.unit.cli.settings_page import PAGE, with_tables

from bngrad_cli import settings
from bngrad_cli.main import main as command_line
from bngrad_server.config import ServerConfig, setting_name


@pytest.fixture(autouse=True)
def _an_environment_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("BNGRAD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bngrad.toml"


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(command_line, ["config", *map(str, arguments)])


def effective(*arguments: object, **environment: str) -> dict[str, Any]:
    result = run("--json", *arguments, **environment)
    assert result.exit_code == 0, result.output
    return {name: (each["value"], each["origin"]) for name, each in json.loads(result.output).items()}


def flag(name: str, text: str) -> tuple[str, ...]:
    spelled = name.replace("_", "-")
    if text in ("True", "False"):
        return (f"--{spelled}" if text == "True" else f"--no-{spelled}",)
    return f"--{spelled}", text


def test_a_flag_overrides_the_environment_which_overrides_the_file(file: Path) -> None:
    file.write_text("workers = 5\nmax_requests = 5\nmax_wait = 5\n")
    environment = {"BNGRAD_MAX_REQUESTS": "6", "BNGRAD_MAX_WAIT": "6s", "BNGRAD_CONFIG": str(file)}
    settings = effective("--max-wait", "7", **environment)
    assert settings["workers"] == (5, f"workers in {file}")
    assert settings["max_requests"] == (6, "BNGRAD_MAX_REQUESTS")
    assert settings["max_wait"] == (7.0, "--max-wait")
    assert settings["max_batch_jobs"] == (64, "default")


def test_every_setting_can_be_given_in_every_way(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bngrad_server.security.setup.check_files", lambda _: None)  # there are none of the names below
    defaults = effective()
    assert list(defaults) == [setting_name(name) for name in ServerConfig.model_fields]
    texts = {name: ",".join(value) if isinstance(value, list) else str(value) for name, (value, _) in defaults.items()}
    given = {name: "something" for name, (value, _) in defaults.items() if value is None}
    given |= {"http": "localhost:9464", "advertise_stream": "none"}
    texts |= given
    flags = [word for name, text in texts.items() for word in flag(name, text)]
    variables = {f"BNGRAD_{name.upper()}": text for name, text in texts.items()}
    file.write_text("".join(f"{name} = {json.dumps(text)}\n" for name, text in texts.items()))
    ways = (effective(*flags), effective(**variables), effective("--config", file))
    values = [{name: value for name, (value, _) in way.items()} for way in ways]
    assert values[0] == values[1] == values[2] == {name: value for name, (value, _) in defaults.items()} | given
    assert all(origin != "default" for way in ways for _, origin in way.values())


def test_a_list_may_be_several_flags_text_with_commas_or_a_list(file: Path) -> None:
    file.write_text('listen = ["a:1", "unix:/b"]')
    expected = ["a:1", "unix:/b"]
    assert effective("--listen", "a:1", "--listen", "unix:/b")["listen"][0] == expected
    assert effective(BNGRAD_LISTEN="a:1,unix:/b")["listen"][0] == expected
    assert effective("--config", file)["listen"][0] == expected
    assert effective("--listen", "a:1, unix:/b")["listen"][0] == expected


def test_toml_output_is_a_file_of_the_same_settings(file: Path) -> None:
    arguments = ("--listen", "unix:/tmp/\N{SNOWMAN}\N{BROOM}", "--max-wait", "1.5", "--workers", "3")
    file.write_text(run("--toml", *arguments).output)
    again = effective("--config", file)
    assert {name: value for name, (value, _) in again.items()} == {
        name: value for name, (value, _) in effective(*arguments).items()
    }


def test_the_table_has_every_setting_with_its_origin() -> None:
    result = run("--max-wait", "500ms")
    assert [line.split()[0] for line in result.output.splitlines() if " default " in line or " --" in line] == [
        setting_name(name) for name in ServerConfig.model_fields
    ]
    assert "max_wait 0.5 seconds --max-wait" in " ".join(result.output.split())


def test_the_table_tells_a_value_of_none_from_the_default() -> None:
    shown = [" ".join(run(*arguments).output.split()) for arguments in ((), ("--advertise-stream", "none"))]
    assert "advertise_stream the address that a client was given default" in shown[0]
    assert "advertise_stream none --advertise-stream" in shown[1]


def test_the_table_takes_no_value_for_markup() -> None:
    assert "[fd00::1]:50051" in run("--listen", "[fd00::1]:50051").output


def test_the_table_cuts_no_value() -> None:
    assert "…" not in run("--listen", f"unix:/{'long/' * 18}socket").output


@pytest.mark.parametrize(
    ("arguments", "environment", "content", "complaint"),
    [
        (["--threads", "x"], {}, "", "--threads is 'x'; it should be a whole number"),
        (["--device", "cpu,cpu"], {}, "", "--device is 'cpu,cpu'; it should be auto, or 'cpu' or 'cuda:N', each once"),
        ([], {"BNGRAD_MAX_WAIT": "-1"}, "", "BNGRAD_MAX_WAIT is '-1'; it should be greater than 0"),
        ([], {"BNGRAD_LISTEN": "nowhere"}, "", "BNGRAD_LISTEN is 'nowhere'; it should be HOST:PORT or unix:PATH"),
        ([], {"BNGRAD_MAX_WAITS": "1"}, "", "BNGRAD_MAX_WAITS in the environment is no setting; did you mean "),
        ([], {"BNGRAD_QQ": "1"}, "", "BNGRAD_QQ in the environment is no setting\n"),
        ([], {}, "max_wait = 0", "max_wait in {file} is 0; it should be greater than 0"),
        ([], {}, "threads = true", "threads in {file} is True; it should be a number, not a boolean"),
        ([], {"BNGRAD_THREADS": "true"}, "", "BNGRAD_THREADS is 'true'; it should be a whole number"),
        (
            ["--max-wait", "true"],
            {},
            "",
            "--max-wait is 'true'; it should be a number, perhaps with one of",
        ),
        ([], {"BNGRAD_INSECURE": "maybe"}, "", "BNGRAD_INSECURE is 'maybe'; it should be true or false\n"),
        ([], {}, "traces = 2", "traces in {file} is 2; it should be true or false\n"),
        ([], {}, "traces = [2]", "traces in {file} is [2]; it should be true or false\n"),
        ([], {}, "listen = 5", "listen in {file} is 5; it should be a list of strings\n"),
        ([], {}, "listen = [5]", "listen in {file} is 5; it should be a string, in quotes\n"),
        ([], {}, "http = 9464", "http in {file} is 9464; it should be a string, in quotes\n"),
        ([], {}, "socket_mode = 600", "socket_mode in {file} is 600; it should be a string, in quotes\n"),
        ([], {}, "tls_key = 5", "tls_key in {file} is 5; it should be a string, in quotes\n"),
        ([], {}, "workers = 1.5", "workers in {file} is 1.5; it should be a whole number\n"),
        ([], {}, "workers = [1]", "workers in {file} is [1]; it should be a whole number\n"),
        (["--arena-bytes", "1"], {}, "", "--arena-bytes is '1'; it should be at least 1MiB: the tensors of every"),
        ([], {}, "max-wait = 1", "max-wait in {file} is no setting; did you mean max_wait?"),
        ([], {}, "max_wait_s = 1", "max_wait_s in {file} is no setting; did you mean max_wait?"),
        ([], {}, "[max_wait]\nx = 1", "max_wait in {file} is {{'x': 1}}; it should be a number\n"),
        ([], {}, "max_wait = ", "cannot read settings from {file}: Invalid value"),
        (["--config", "/nowhere.toml"], {}, "", "cannot read settings from /nowhere.toml: there is no such file"),
        (["--max-message-bytes", "10GiB"], {}, "", "--max-message-bytes is '10GiB'; it should be less than or equal"),
        (["--socket-mode", "999"], {}, "", "--socket-mode is '999'; it should be three octal digits for owner, group"),
        (["--arena-bytes", "lots"], {}, "", "--arena-bytes is 'lots'; it should be a number, perhaps with"),
        (["--listen", "a:99999"], {}, "", "--listen is 'a:99999'; it should be HOST:PORT or unix:PATH, with a port"),
        (["--config", "/tmp"], {}, "", "cannot read settings from /tmp: it is no file"),
        (["--http", "http://a:1"], {}, "", "--http is 'http://a:1'; it should be HOST:PORT, with a port of at most"),
        (["--http", "127.0.0.1:50051"], {}, "", "--http should not be 127.0.0.1:50051, which --listen names"),
        (
            ["--listen", "unix:/a", "--advertise-stream", "a:1"],
            {},
            "",
            "--advertise-stream needs an address HOST:PORT in --listen, to which a:1 leads",
        ),
        (
            ["--tls-certificate", "a"],
            {"BNGRAD_TLS_CLIENT_CA": "b"},
            "",
            "--tls-certificate and --tls-key need each other",
        ),
        ([], {"BNGRAD_TLS_CLIENT_CA": "b"}, "", "BNGRAD_TLS_CLIENT_CA needs --tls-certificate and --tls-key"),
        ([], {}, "tls_key = 'a'", "--tls-certificate and tls_key in {file} need each other"),
    ],
)
def test_an_invalid_setting_is_named_in_one_line_with_exit_code_2(
    file: Path, arguments: list[str], environment: dict[str, str], content: str, complaint: str
) -> None:
    file.write_text(content)
    for command in ("config", "serve"):
        words = [command, "--config", str(file), *arguments]
        result = CliRunner(env=environment).invoke(command_line, words)
        assert result.exit_code == 2
        assert result.output.startswith("Error: " + complaint.format(file=file))
        assert result.output.count("\n") == 1


def test_a_file_that_may_not_be_looked_at_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", denied(file, os.stat))
    result = run("--config", file)
    assert (result.exit_code, result.output) == (2, f"Error: cannot read settings from {file}: Permission denied\n")


def test_all_invalid_settings_are_named() -> None:
    lines = run("--threads", "0", "--workers", "0").output.splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["Error: --threads", "--workers"]


def test_the_variables_of_kubernetes_services_are_ignored() -> None:
    said = {
        "BNGRAD_SERVICE_HOST": "10.0.0.1",
        "BNGRAD_SERVICE_PORT": "50051",
        "BNGRAD_SERVICE_PORT_GRPC": "50051",
        "BNGRAD_PORT": "tcp://10.0.0.1:50051",
        "BNGRAD_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "BNGRAD_PORT_50051_TCP_ADDR": "10.0.0.1",
        "BNGRAD_METRICS_PORT_9090_TCP_PROTO": "tcp",
        "BNGRAD_STREAM_PORT": "tcp://10.0.0.1:50051",
    }
    assert effective(**said) == effective()


def test_an_empty_variable_is_ignored() -> None:
    assert effective(BNGRAD_MAX_WAIT="")["max_wait"] == (5.0, "default")


def test_help_has_the_unit_variable_and_default_of_each_setting() -> None:
    text = " ".join(CliRunner().invoke(command_line, ["serve", "--help"]).output.split())
    for name in map(setting_name, ServerConfig.model_fields):
        assert f" --{name.replace('_', '-')} " in text
        assert f"[env: BNGRAD_{name.upper()}; default: " in text
    assert "--drain-timeout SECONDS How long requests in flight may take to end after SIGTERM." in text
    assert "--threads INTEGER" in text
    assert "default: every core]" in text


def test_the_page_of_settings_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run: make settings-page"


def test_the_file_on_the_page_of_settings_is_valid(file: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.+?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    file.write_text(example)
    assert effective("--config", file)["max_wait"] == (0.5, f"max_wait in {file}")


def test_the_help_of_serve_has_every_setting_once_in_groups_with_examples() -> None:
    grouped = [name for names in settings.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(setting_name(name) for name in ServerConfig.model_fields)
    text = CliRunner().invoke(command_line, ["serve", "--help"]).output
    assert text.count("\n    bngrad serve ") == 2
    assert [text.count(f"\n{title}:\n") for title in [*settings.GROUPS, "Options"]] == [1] * (len(settings.GROUPS) + 1)
    assert [name for name in grouped if f"{settings.flag(name)}" not in text] == []
