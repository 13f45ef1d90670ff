"""The table from exceptions to status codes: how a request is counted, and what its client gets."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_server import errors
from bngrad_wire import http2


class _PoolTimeoutError(TimeoutError):
    """Stands for any class derived from one of the table's."""


@pytest.mark.parametrize(
    ("error", "counted", "told", "message"),
    [
        (InvalidArgumentError((FieldViolation("x", "is wrong"),)), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "wrong"),
        (DecodeError("garbage"), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "garbage"),
        (errors.OverloadedError("full", 0.5), "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", "full"),
        (errors.ArenaTooSmallError("large"), "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", "large"),
        (errors.MessageTooLargeError("large"), "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", "large"),
        (MemoryError("secret"), "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", "no memory left"),
        (TimeoutError("late"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "late"),
        (_PoolTimeoutError("late"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "late"),
        (errors.UnauthenticatedError(), "UNAUTHENTICATED", "UNAUTHENTICATED", errors.REFUSAL),
        (errors.ComputeError("two workers died"), "INTERNAL", "INTERNAL", "two workers died"),
        (CancelledError(), "CANCELLED", "UNAVAILABLE", "the server is stopping"),
        (BrokenPipeError("secret"), "CANCELLED", "INTERNAL", "the server failed"),
        (http2.PeerGoneError("secret"), "CANCELLED", "INTERNAL", "the server failed"),
        (http2.RpcError(1, "secret"), "CANCELLED", "INTERNAL", "the server failed"),
        (http2.RpcError(12, "secret"), "UNIMPLEMENTED", "INTERNAL", "the server failed"),
        (RuntimeError("secret"), "INTERNAL", "INTERNAL", "the server failed"),
    ],
)
def test_each_exception_has_a_row(error: Exception, counted: str, told: str, message: str) -> None:
    assert errors.code_of(error).name == counted
    code, status = errors.grpc_status(error)
    assert (code.name, status.code) == (told, code.value[0])
    assert message in status.message
    assert "secret" not in status.message


def test_a_call_that_its_handler_gives_up_is_cancelled() -> None:
    assert errors.code_of(GeneratorExit()) is grpc.StatusCode.CANCELLED


def test_only_unexpected_exceptions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for error in (TimeoutError(), CancelledError(), errors.OverloadedError("full", 1), errors.ComputeError("dead")):
            errors.grpc_status(error)
        assert caplog.records == []
        errors.grpc_status(RuntimeError("broken"))
    assert "RuntimeError: broken" in caplog.text


@pytest.mark.parametrize(("error", "delay_ms"), [(errors.OverloadedError("full", 0.25), 250), (MemoryError(), 1000)])
def test_a_full_server_tells_when_to_retry(error: Exception, delay_ms: int) -> None:
    _, status = errors.grpc_status(error)
    retry_info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry_info)
    assert retry_info.retry_delay.ToMilliseconds() == delay_ms


def test_what_is_wrong_with_a_request_is_told_by_field() -> None:
    _, status = errors.grpc_status(InvalidArgumentError((FieldViolation("x", "is wrong"), FieldViolation("y", "too"))))
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert [each.field for each in bad_request.field_violations] == ["x", "y"]


def test_long_texts_are_cut() -> None:
    _, status = errors.grpc_status(InvalidArgumentError((FieldViolation("x", "ä" * 10_000),)))
    assert len(status.SerializeToString()) < 2048
