"""The log of a real server: formats, request ids, rate limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from tests.monitoring.conftest import HTTP, call, http_of, status_of
from tests.servers import ONE_WORKER, TIMEOUT_S, targets_of, wait_until, workers_of

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.addresses import ready_address

MARK = 0.1234567
"""A value in every tensor that no log may contain."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(options=(*HTTP, "--log-format", "json")) as server:
        yield server


def send_wrong_request(target: str, *metadata: tuple[str, str]) -> None:
    tensor = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[1, 1, 1, 1], data=np.full(1, MARK, np.float32).tobytes())
    request = pb.FusedBatchNormGradV2Request(y_backprop=tensor, x=tensor)
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError):
        pb_grpc.BatchNormGradServiceStub(channel).FusedBatchNormGradV2(request, metadata=metadata)


def failures(server: EmbeddedServer) -> list[dict[str, Any]]:
    whole, _, _ = server.stderr().rpartition("\n")
    lines = map(json.loads, whole.splitlines())
    return [line for line in lines if line["logger"] == "bngrad_server.telemetry.observer"]


def test_a_failed_request_is_logged_with_the_id_of_its_client(server: EmbeddedServer) -> None:
    send_wrong_request(server.target, ("x-request-id", "mine"))
    wait_until(lambda: any(line["request_id"] == "mine" for line in failures(server)))
    (line,) = (line for line in failures(server) if line["request_id"] == "mine")
    assert (line["level"], line["code"], line["op"]) == ("info", "INVALID_ARGUMENT", "FusedBatchNormGradV2")
    assert (line["transport"], line["client"]) == ("unary", "127.0.0.1")
    assert "scale must be given" in line["message"]
    assert str(MARK) not in server.stderr()


def test_an_id_with_control_characters_is_replaced(server: EmbeddedServer) -> None:
    before = len(failures(server))
    send_wrong_request(server.target, ("x-request-id", "a b=c"))
    wait_until(lambda: len(failures(server)) > before)
    assert re.fullmatch("[0-9a-f]{16}", failures(server)[-1]["request_id"])


def test_in_a_storm_of_errors_only_some_are_logged_and_the_others_are_counted(server: EmbeddedServer) -> None:
    http, count = http_of(server), 400

    def ended() -> int:
        return sum(row[-1] for row in status_of(http)["server"]["requests"])

    def left_out() -> int:
        count: int = status_of(http)["server"]["failures_left_out"]
        return count

    def fail(client: bngrad.Client) -> None:
        with pytest.raises(bngrad.InvalidArgumentError):
            call(client, epsilon=-1.0)

    wait_until(lambda: ended() == len(failures(server)))  # the HTTP process's data is up to 0.2 s old
    before = ended()
    with ThreadPoolExecutor(8) as threads, bngrad.Client(server.target) as client:
        list(threads.map(fail, [client] * count))
    wait_until(lambda: ended() == before + count)
    wait_until(lambda: len(failures(server)) + left_out() == ended())
    assert left_out() > 0


def test_warnings_of_libraries_are_logged() -> None:
    code = "from bngrad_server.telemetry import logs; logs.set_up('json', 'info'); "
    code += "import warnings; warnings.warn('odd\\nthings')"
    finished = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=True)
    (line,) = map(json.loads, finished.stderr.splitlines())
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "odd\nthings" in line["message"]


def test_exceptions_that_end_a_thread_are_logged() -> None:
    code = "from bngrad_server.telemetry import logs; logs.set_up('json', 'info'); "
    code += "import threading; threading.Thread(target=int, args=('odd\\x1b\\n',), name='worker').start()"
    finished = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=True)
    (line,) = map(json.loads, finished.stderr.splitlines())
    assert (line["level"], line["message"]) == ("error", "the thread worker failed")
    assert "invalid literal for int()" in line["exception"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--listen", "256.0.0.1:0"), 1, "cannot listen on 256.0.0.1:0"),
        (("--token-file", "/no/such/file"), 2, "--token-file is '/no/such/file'"),
    ],
    ids=["address", "file"],
)
def test_the_reason_why_a_server_does_not_start_is_json_too(options: tuple[str, ...], code: int, message: str) -> None:
    command = [sys.executable, "-m", "bngrad_cli", "serve", "--device", "cpu", "--log-format", "json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    line = json.loads(ended.stderr.splitlines()[-1])
    assert (ended.returncode, line["level"]) == (code, "critical")
    assert line["message"].startswith(message)


def test_workers_log_in_the_same_format_and_at_the_same_level() -> None:
    with EmbeddedServer(options=("--log-format", "json", "--log-level", "error")) as server:
        workers_of(server.process.pid)[0].kill()
        wait_until(lambda: "was killed by SIGKILL" in server.stderr())
        assert [json.loads(line)["level"] for line in server.stderr().splitlines()] == ["error"]


def test_a_log_that_is_not_read_does_not_block_requests() -> None:
    """Like ``bngrad serve 2>&1 | sleep 1000`` once the pipe is full; here it is full from the first line on."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    command = [sys.executable, "-m", "bngrad_cli", "serve", "--listen", "127.0.0.1:0", *ONE_WORKER]
    with (
        open(reading, "rb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True) as process,
    ):
        os.close(writing)
        try:
            assert process.stdout is not None
            address = ready_address(process.stdout.readline())
            assert address is not None
            for target in targets_of(address).values():
                send_wrong_request(target)
            workers_of(process.pid)[0].kill()
            with bngrad.Client(address) as client:
                call(client)
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
        assert not log.read().strip(b"x")


def test_a_server_whose_standard_output_is_closed_says_why_it_ends() -> None:
    """Like ``bngrad serve | true``."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "bngrad_cli", "serve", "--listen", "127.0.0.1:0", *ONE_WORKER]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert "the server ends, since its standard output cannot be written: Broken pipe" in done.stderr


def test_lines_without_room_are_counted_and_the_others_written() -> None:
    code = """
import logging, os, sys, time
from bngrad_server.telemetry import logs
os.dup2(int(sys.argv[1]), 2)
logs.set_up("console", "info")
logs._MAX_LINES = 5
for number in range(2000):
    logging.getLogger(str(number)).info("%s", "y" * 1000)
print("ready", flush=True)
sys.stdin.readline()
"""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", code, str(writing)]
    with (
        open(reading, "rb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(writing,)) as process,
    ):
        os.close(writing)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        lines = log.read().decode().splitlines()
    told = [re.search(r" (\d+) lines were left out", line) for line in lines]
    left_out = sum(int(each[1]) for each in told if each is not None)
    assert left_out > 0
    assert sum(line.endswith("yyy") for line in lines) + left_out == 2000
