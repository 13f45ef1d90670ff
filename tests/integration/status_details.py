"""Reads the details of an error's status."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


def violations(error: Any) -> dict[str, str]:
    """Returns the field violations in the details of an INVALID_ARGUMENT error."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    return {violation.field: violation.description for violation in bad_request.field_violations}


def retry_delay_s(error: Any) -> float:
    """Returns when a RESOURCE_EXHAUSTED error says to retry, in seconds."""
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(error)
    assert status is not None
    retry_info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry_info)
    return float(retry_info.retry_delay.ToTimedelta().total_seconds())
