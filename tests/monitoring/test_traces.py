"""Spans as a real OTLP receiver, in its own process, gets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from tests.monitoring.conftest import call
from tests.servers import TIMEOUT_S, Transport, wait_until, workers_of

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

SERVER, ERROR = 2, 2
STAGES = {"decode", "wait for memory", "copy", "wait for a worker", "compute", "encode"}


class Receiver:
    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - for as long as the process
        command = [sys.executable, "-m", "tests.monitoring.otlp_receiver"]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdout=self._output, cwd=root)
        wait_until(lambda: bool(self._lines()))
        self.endpoint = f"http://127.0.0.1:{self._lines()[0]}"

    def _lines(self) -> list[str]:
        whole, _, _ = os.pread(self._output.fileno(), 2**24, 0).rpartition(b"\n")
        return whole.decode().splitlines()

    def spans(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines()[1:]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._output.close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def traced(receiver: Receiver) -> Iterator[EmbeddedServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with EmbeddedServer(options=("--traces",)) as server:
            yield server


def stub_call(target: str, *, chunked: bool, epsilon: float = 1e-4) -> None:
    """Makes a call with a stock client, which sends its trace context."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)

    def tensor(shape: tuple[int, ...], *, data: bool = True) -> pb.Tensor:
        ones = np.ones(shape, np.float32)
        return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape, data=ones.tobytes() if data else b"")

    large, small = tensor((1, 2, 2, 4), data=not chunked), tensor((4,))
    request = pb.FusedBatchNormGradV2Request(
        y_backprop=large, x=large, scale=small, reserve_space_1=small, reserve_space_2=small, epsilon=epsilon
    )
    with grpc.insecure_channel(target) as channel:
        stub = pb_grpc.BatchNormGradServiceStub(channel)
        if chunked:
            chunk = pb.ExchangeRequest(chunk=np.ones(16, np.float32).tobytes())
            messages = [pb.ExchangeRequest(fused_batch_norm_grad_v2=request), chunk, chunk]
            assert len(list(stub.Exchange(iter(messages), metadata=tuple(carrier.items())))) == 2
        else:
            stub.FusedBatchNormGradV2(request, metadata=tuple(carrier.items()))


def sdk_call(target: str, transport: Transport) -> None:
    with bngrad.Client(target, transport=transport) as client:
        call(client)


CALLS: dict[str, Callable[[str], None]] = {
    "SDK, unary": lambda target: sdk_call(target, "unary"),
    "SDK, stream": lambda target: sdk_call(target, "stream"),
    "SDK, shared": lambda target: sdk_call(target, "shared"),
    "grpcio, unary": lambda target: stub_call(target, chunked=False),
    "grpcio, stream": lambda target: stub_call(target, chunked=True),
}


def spans_of(receiver: Receiver, span: trace.Span, count: int) -> list[dict[str, Any]]:
    """Waits for ``count`` of the server's spans of a trace and returns them."""
    trace_id = f"{span.get_span_context().trace_id:032x}"

    def spans() -> list[dict[str, Any]]:
        return [each for each in receiver.spans() if each["trace"] == trace_id and "ServerInfo" not in each["name"]]

    wait_until(lambda: len(spans()) >= count)
    return spans()


@pytest.mark.parametrize("way", CALLS)
def test_a_request_continues_the_trace_of_its_client(receiver: Receiver, traced: EmbeddedServer, way: str) -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("training step") as step:
        CALLS[way](traced.target)
    spans = spans_of(receiver, step, 1 + len(STAGES))
    (root,) = (span for span in spans if span["kind"] == SERVER)
    method = "Exchange" if "stream" in way else "FusedBatchNormGradV2"
    assert root["name"].strip("/") == f"bngrad.v1.BatchNormGradService/{method}"
    assert root["parent"] == f"{step.get_span_context().span_id:016x}"
    assert (root["service"], root["code"], root["status"]) == ("bngrad", 0, 0)
    stages = sorted((span for span in spans if span is not root), key=lambda span: (span["start"], span["end"]))
    assert {span["name"] for span in stages} == STAGES
    assert all(span["parent"] == root["id"] for span in stages)
    clock_ns = 1_000_000  # the difference allowed between two clocks
    assert root["start"] - clock_ns <= stages[0]["start"] <= stages[-1]["end"] <= root["end"] + clock_ns


def test_a_request_that_fails_has_a_span_with_its_status(receiver: Receiver, traced: EmbeddedServer) -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("training step") as step, pytest.raises(grpc.RpcError, match="epsilon"):
        stub_call(traced.target, chunked=False, epsilon=-1.0)
    (span,) = spans_of(receiver, step, 1)
    assert (span["kind"], span["status"], span["code"]) == (SERVER, ERROR, 3)


def test_health_is_answered_while_many_traced_calls_wait() -> None:
    options = ("--traces", "--workers", "1", "--worker-timeout", "600", "--front-bytes", "0")
    with EmbeddedServer(options=options) as server, grpc.insecure_channel(server.target) as channel:
        (worker,) = workers_of(server.process.pid)
        stub = pb_grpc.BatchNormGradServiceStub(channel)
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        worker.suspend()
        with ThreadPoolExecutor(24) as threads:
            try:
                calls = [threads.submit(stub_call, server.target, chunked=False) for _ in range(24)]
                wait_until(lambda: stub.ServerInfo(pb.ServerInfoRequest(), timeout=30).requests == len(calls))
                assert check(health_pb2.HealthCheckRequest(), timeout=30).status
            finally:
                worker.resume()
            for each in calls:
                each.result()


def test_an_unreachable_receiver_does_not_disturb_calls() -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        with EmbeddedServer(options=("--traces",)) as server:
            sdk_call(server.target, "unary")
            server.process.terminate()
            assert server.process.wait(TIMEOUT_S / 3) == 0


@pytest.mark.parametrize(
    "variable", ["OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_PROPAGATORS"]
)
def test_a_variable_of_opentelemetry_that_it_does_not_take_ends_the_server_with_a_sentence(variable: str) -> None:
    command = [sys.executable, "-m", "bngrad_cli", "serve", "--traces", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, variable: "nonsense"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: OpenTelemetry does not take its OTEL_* variables: ")
    assert "nonsense" in line
