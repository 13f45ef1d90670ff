"""The system gives the front process no more memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import psutil
import pytest
from tests.raw_http2 import path_of, request
from tests.servers import ONE_WORKER, TIMEOUT_S, descriptors_of, targets_of, wait_until, worker_pid

from bngrad_cli.embedded import EmbeddedServer

MIB = 2**20
OP = path_of("FusedBatchNormGradV2")
SMALL = request(4096).SerializeToString()
LARGE = request(16 * MIB).SerializeToString()
_WITHOUT_MEMORY = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@contextmanager
def nearly_without_memory(server: EmbeddedServer, spare_nbytes: int) -> Iterator[None]:
    """Lets the front process take only so much more memory."""
    front, limit = server.process.pid, resource.RLIMIT_AS
    soft, hard = resource.prlimit(front, limit)
    resource.prlimit(front, limit, (psutil.Process(front).memory_info().vms + spare_nbytes, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(front, limit, (soft, hard))


@pytest.mark.parametrize("spare_nbytes", [0, MIB])
def test_calls_without_memory_end_soon_and_leave_nothing_behind(spare_nbytes: int) -> None:
    """Where nothing at all is left, the system may not even give what it takes to refuse a call with a status."""
    with (
        EmbeddedServer(options=(*ONE_WORKER, "--max-message-bytes", "64MiB")) as server,
        grpc.insecure_channel(server.target, options=OPTIONS) as channel,
    ):
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(OP)
        call(SMALL, timeout=TIMEOUT_S)
        descriptors = len(descriptors_of(server.process.pid))
        with nearly_without_memory(server, spare_nbytes):
            for message in (LARGE, SMALL) * 2:
                try:
                    call(message, timeout=TIMEOUT_S)
                except grpc.RpcError as error:
                    assert error.code() in _WITHOUT_MEMORY, error  # noqa: PT017
        for message in (LARGE, SMALL):
            call(message, timeout=TIMEOUT_S, wait_for_ready=True)
        wait_until(lambda: len(descriptors_of(server.process.pid)) <= descriptors)


def test_a_worker_survives_a_front_process_without_memory() -> None:
    """Neither its answers nor its heartbeats need new memory there."""
    options = ("--workers", "1", "--front-bytes", "0", "--worker-timeout", "1")
    with (
        EmbeddedServer(options=options) as server,
        grpc.insecure_channel(targets_of(server.target)["tcp"]) as channel,
    ):
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(OP)
        call(SMALL, timeout=TIMEOUT_S)
        worker = worker_pid(server)
        with nearly_without_memory(server, 0):
            for _ in range(20):
                call(SMALL, timeout=TIMEOUT_S)
                time.sleep(0.1)
        assert worker_pid(server) == worker
