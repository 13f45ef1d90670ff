"""Sampling, and the formats of lines."""

from __future__ import annotations

import json
import logging
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


def test_the_memory_for_kinds_is_bounded(clock: list[float]) -> None:
    sampler = logs.Sampler()
    for number in range(10_000):
        sampler.admit(f"kind {number}")
    assert len(sampler._seconds) <= 1000


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


def test_a_json_line_is_one_line_for_any_message() -> None:
    line = logs.JsonFormatter().format(record('two\nlines and a "quote"', code="INTERNAL"))
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["message"], entry["level"], entry["code"]) == ('two\nlines and a "quote"', "warning", "INTERNAL")


def test_a_json_line_has_the_exception() -> None:
    made = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert json.loads(logs.JsonFormatter().format(made))["exception"].endswith("ValueError: why")
