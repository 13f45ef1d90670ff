"""What a client is told when a request cannot be answered."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_server.arena import ArenaTooSmallError
from bngrad_server.pool import ComputeError

logger = logging.getLogger(__name__)


@contextmanager
def status_of_errors(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends the call with the status that an exception of the engine stands for.

    The text of an unexpected exception stays in the log: it may tell what is no client's business.
    """
    try:
        yield
    except InvalidArgumentError as error:
        context.abort_with_status(rpc_status.to_status(_invalid_argument(error)))
    except ArenaTooSmallError as error:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except TimeoutError as error:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    except CancelledError:
        context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
    except ComputeError as error:
        context.abort(grpc.StatusCode.INTERNAL, str(error))
    except Exception:
        logger.exception("a call failed")
        context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says why")


def _invalid_argument(error: InvalidArgumentError) -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=str(error))
    status.details.add().Pack(
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.description)
                for violation in error.violations
            ]
        )
    )
    return status
