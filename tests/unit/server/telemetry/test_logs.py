"""Sampling, and the formats of lines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter

import pytest

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_server.rpc_context import RpcContext
from bngrad_server.telemetry import logs
from bngrad_server.telemetry.observer import Observer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("bngrad_server.telemetry.logs.time.monotonic", lambda: now[0])
    return now


def test_ten_of_a_kind_a_second_are_admitted_and_the_next_one_counts_the_others(clock: list[float]) -> None:
    sampler = logs.Sampler()
    assert [sampler.admit("a") for _ in range(13)] == [0] * 10 + [None] * 3
    assert sampler.admit("b") == 0
    clock[0] += 1.1
    assert sampler.admit("a") == 3
    assert sampler.admit("a") == 0
    assert sampler.left_out == 3


def test_of_all_kinds_no_more_than_the_most_are_admitted_a_second(clock: list[float]) -> None:
    sampler = logs.Sampler(100)
    for _ in range(2):
        admitted = [sampler.admit(f"kind {number % 200}") for number in range(1000)]
        assert sum(each is not None for each in admitted) == 100
        clock[0] += 1.1
    assert sampler.left_out == 1800


def test_the_failures_of_one_client_do_not_hide_those_of_others(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    observer = Observer()
    caplog.set_level(logging.INFO)
    for client, times in (("eve", 1000), ("alice", 2), ("eve", 10)):
        context = RpcContext(client, None, lambda: False, lambda: None, {})
        for _ in range(times):
            observer.failed("FusedBatchNormGradV2", "unary", context, InvalidArgumentError(()), 0.0)
    clients = Counter(failure["client"] for failure in observer.recent_failures())
    assert clients == {"eve": 10, "alice": 2}
    assert len(caplog.records) == 12


def test_the_memory_for_kinds_is_bounded(clock: list[float]) -> None:
    sampler = logs.Sampler()
    for number in range(10_000):
        sampler.admit(f"kind {number}")
    assert len(sampler._kinds) <= 1000


def test_each_failure_that_is_not_logged_is_counted(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    observer, context = Observer(), RpcContext("here", None, lambda: False, lambda: None, {})
    filtering = logs.SamplingFilter()
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(filtering)
    try:
        for error in [InvalidArgumentError(())] * 30 + [RuntimeError("broken")] * 5:
            observer.failed("FusedBatchNormGradV2", "unary", context, error, 0.0)
    finally:
        caplog.handler.removeFilter(filtering)
    assert Counter(logged.levelname for logged in caplog.records) == {"INFO": 10, "ERROR": 5}
    assert observer.failures_left_out == 20


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("some.logger", logging.WARNING, "file", 1, message, (), None)
    if fields:
        made.fields = fields
    return made


def test_a_console_line_ends_with_the_fields_of_the_request() -> None:
    line = logs.ConsoleFormatter().format(record("refused", code="INTERNAL", request_id="7"))
    assert line.endswith(" WARNING some.logger: refused code=INTERNAL request_id=7")


HOSTILE = "eve\r\n2026-01-01 ERROR all is lost\x1b[2J\x9b31m\u2028\u202egnp\x7f\udcff"
"""Text that would forge a line, clear the screen, and turn letters round."""


@pytest.mark.parametrize("place", ["message", "argument", "logger", "field", "exception", "stack"])
def test_a_console_line_has_no_control_character_of_any_text(place: str) -> None:
    made = record(HOSTILE if place == "message" else "failed %s", client=HOSTILE if place == "field" else "eve")
    made.args = (HOSTILE if place == "argument" else "here",) if place != "message" else ()
    if place == "logger":
        made.name = HOSTILE
    if place == "stack":
        made.stack_info = HOSTILE
    if place == "exception":
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            made.exc_info = sys.exc_info()
    first, *further = logs.ConsoleFormatter().format(made).split("\n")
    assert all(line.isprintable() for line in (first, *further))
    assert all(line.startswith("    ") for line in further)
    assert bool(further) == (place in {"exception", "stack"})
    assert any(r"all is lost\x1b[2J\x9b31m\u2028\u202egnp\x7f\udcff" in line for line in (first, *further))


def test_a_console_line_keeps_letters_of_every_language() -> None:
    line = logs.ConsoleFormatter().format(record("größer, 更大, больше"))
    assert line.endswith("größer, 更大, больше")


def test_a_json_line_is_one_line_for_any_message() -> None:
    line = logs.JsonFormatter().format(record('two\nlines and a "quote"', code="INTERNAL"))
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["message"], entry["level"], entry["code"]) == ('two\nlines and a "quote"', "warning", "INTERNAL")


@pytest.mark.parametrize(("level", "severity"), [("debug", "debug"), ("error", "info")])
@pytest.mark.parametrize("library", ["hpack.hpack", "asyncio"])
def test_lines_for_debugging_are_the_servers_own(library: str, level: str, severity: str) -> None:
    script = f"""
import logging
from bngrad_server.telemetry import logs
logs.set_up("console", "{level}")
logging.getLogger("{library}").{severity}("a detail")
logging.getLogger("bngrad_server").{level}("the end")
logging.shutdown()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "the end" in ended.stderr
    assert "a detail" not in ended.stderr


def test_a_json_line_has_the_exception() -> None:
    made = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert json.loads(logs.JsonFormatter().format(made))["exception"].endswith("ValueError: why")
