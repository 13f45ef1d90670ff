"""The command line as processes, against real servers and against other programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2_grpc
from tests.servers import (
    BNGRAD,
    ONE_WORKER,
    TIMEOUT_S,
    Transport,
    hold_new_workers,
    interruptible,
    run_bngrad,
    starting_server,
    wait_until,
    worker_pid,
)

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire import __version__

STEPS = ["health", "server", "unary", "stream", "shared", "latency"]


def test_check_waits_for_a_server_that_starts_later(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/socket"
    # A server with an empty kernel cache compiles for minutes.
    arguments = [*BNGRAD, "check", "--quick", "--wait", "300", target]
    with (
        subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as check,
        EmbeddedServer(target, options=ONE_WORKER),
    ):
        said, _ = check.communicate()
    assert (check.returncode, said) == (0, f"✓ health   {target} is SERVING\n")


def test_check_stops_waiting_after_its_limit() -> None:
    ended = run_bngrad("check", "--quick", "--wait", "0.5", "unix:/nowhere.sock")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "unix:/nowhere.sock cannot be reached: No such file or directory" in ended.stderr


def test_a_good_server_passes_every_check(target: str) -> None:
    ended = run_bngrad("check", target, "--timeout", str(TIMEOUT_S))
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [(mark, name) for mark, name, *_ in lines] == [("✓", step) for step in STEPS]


def test_a_good_server_passes_the_long_check(server: EmbeddedServer) -> None:
    ended = run_bngrad("check", "--long", server.target, "--timeout", str(TIMEOUT_S))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line[2:9].strip() for line in ended.stdout.splitlines()] == [*STEPS[:-1], "at once", "large", "latency"]


def test_a_quiet_check_of_a_good_server_prints_nothing(server: EmbeddedServer) -> None:
    ended = run_bngrad("check", "--quiet", "--timeout", str(TIMEOUT_S), server.target)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_quick_check_only_asks_for_the_health_and_imports_little(server: EmbeddedServer) -> None:
    code = f"""
        import sys
        from bngrad_cli.main import main
        main(["check", "--quick", "--timeout", "{TIMEOUT_S}", "{server.target}"], standalone_mode=False)
        assert not {{"numpy", "pydantic", "rich", "bngrad"}} & set(sys.modules)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == f"✓ health   {server.target} is SERVING\n"


def test_a_server_without_shared_memory_passes_the_check() -> None:
    with EmbeddedServer(options=(*ONE_WORKER, "--shared-bytes", "0")) as server:
        ended = run_bngrad("check", server.target, "--timeout", str(TIMEOUT_S))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "- shared" in ended.stdout


def test_a_server_without_a_ready_worker_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"unix:{tmp_path}/bngrad.sock"
    with starting_server(address, hold_new_workers(tmp_path, monkeypatch)):
        wait_until(Path(tmp_path, "bngrad.sock").exists)
        ended = run_bngrad("check", address, "--timeout", str(TIMEOUT_S))
        said = json.loads(run_bngrad("info", address, "--json", "--timeout", str(TIMEOUT_S)).stdout)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"✗ health   {address} is NOT_SERVING: no worker is ready.")
    assert (said["health"], said["devices"][0]["state"]) == ("NOT_SERVING", "starting")


def zeros(like: pb.Tensor) -> pb.Tensor:
    return pb.Tensor(dtype=like.dtype, shape=like.shape, data=bytes(len(like.data)))


class WrongServicer(pb_grpc.BatchNormGradServiceServicer):
    """Answers every call with zeros."""

    def ServerInfo(self, request: Any, context: Any) -> pb.ServerInfoResponse:  # noqa: N802
        device = pb.Device(name="cpu", state=pb.WORKER_STATE_READY)
        return pb.ServerInfoResponse(version=__version__, devices=[device])

    def FusedBatchNormGradV3(self, request: Any, context: Any) -> pb.FusedBatchNormGradV3Response:  # noqa: N802
        x, scale = zeros(request.x), zeros(request.scale)
        empty = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[0])
        return pb.FusedBatchNormGradV3Response(
            x_backprop=x, scale_backprop=scale, offset_backprop=scale, reserve_space_4=empty, reserve_space_5=empty
        )

    def FusedBatchNormGradV2(self, request: Any, context: Any) -> pb.FusedBatchNormGradV2Response:  # noqa: N802
        answer = self.FusedBatchNormGradV3(request, context)
        return pb.FusedBatchNormGradV2Response(
            x_backprop=answer.x_backprop, scale_backprop=answer.scale_backprop, offset_backprop=answer.offset_backprop,
            reserve_space_3=answer.reserve_space_4, reserve_space_4=answer.reserve_space_5,
        )  # fmt: skip

    def BatchNormTrainingBackprop(self, request: Any, context: Any) -> pb.BatchNormTrainingBackpropResponse:  # noqa: N802
        x, gamma = zeros(request.input_forward), zeros(request.gamma)
        return pb.BatchNormTrainingBackpropResponse(input_delta=x, gamma_delta=gamma, beta_delta=gamma)

    def FusedBatchNormGradGrad(self, request: Any, context: Any) -> pb.FusedBatchNormGradGradResponse:  # noqa: N802
        x, scale = zeros(request.x), zeros(request.scale)
        return pb.FusedBatchNormGradGradResponse(grad_y_backprop=x, grad_x=x, grad_scale=scale)

    def Exchange(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not even that")

    def SendAhead(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "nor that")


class WrongInInference(WrongServicer):
    """Answers every call by a server, but those of V3 in inference with zeros."""

    def __init__(self, target: str) -> None:
        self._server = pb_grpc.BatchNormGradServiceStub(grpc.insecure_channel(target))

    def FusedBatchNormGradV3(self, request: Any, context: Any) -> pb.FusedBatchNormGradV3Response:  # noqa: N802
        is_training = request.is_training or not request.HasField("is_training")
        return (
            self._server.FusedBatchNormGradV3(request)
            if is_training
            else super().FusedBatchNormGradV3(request, context)
        )

    def FusedBatchNormGradV2(self, request: Any, context: Any) -> pb.FusedBatchNormGradV2Response:  # noqa: N802
        return self._server.FusedBatchNormGradV2(request)

    def BatchNormTrainingBackprop(self, request: Any, context: Any) -> pb.BatchNormTrainingBackpropResponse:  # noqa: N802
        return self._server.BatchNormTrainingBackprop(request)

    def FusedBatchNormGradGrad(self, request: Any, context: Any) -> pb.FusedBatchNormGradGradResponse:  # noqa: N802
        return self._server.FusedBatchNormGradGrad(request)

    def Exchange(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        return self._server.Exchange(request_iterator)


@contextmanager
def grpc_server(*, of_bngrad: bool, tls: bool = False, servicer: WrongServicer | None = None) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    if of_bngrad:
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        pb_grpc.add_BatchNormGradServiceServicer_to_server(servicer or WrongServicer(), server)
    if tls:
        issued = trustme.CA().issue_cert("127.0.0.1")
        pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_server_that_computes_wrongly_fails_the_check() -> None:
    with grpc_server(of_bngrad=True) as address:
        ended = run_bngrad("check", address, "--timeout", str(TIMEOUT_S))
    assert ended.returncode == 1
    assert [line.split()[1] for line in ended.stdout.splitlines()] == ["health", "server"]
    assert ended.stderr.startswith("✗ unary    a wrong answer to V3 NHWC float32 over unary")


def test_only_the_long_check_sees_what_is_wrong_in_inference(server: EmbeddedServer) -> None:
    with grpc_server(of_bngrad=True, servicer=WrongInInference(server.target)) as address:
        short = run_bngrad("check", address, "--timeout", str(TIMEOUT_S))
        long = run_bngrad("check", "--long", address, "--timeout", str(TIMEOUT_S))
    assert (short.returncode, short.stderr) == (0, "")
    assert long.returncode == 1
    assert long.stderr.startswith("✗ unary    a wrong answer to V3 NHWC float32 over unary")


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Accepts TCP connections and passes each to ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connections.append(connection)
                answer(connection)

        connections: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


class WebPage(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@contextmanager
def web_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), WebPage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("peer", "complaint", "timeout_s"),
    [
        (lambda: grpc_server(of_bngrad=False), "{} does not know the health check, so it is no server", TIMEOUT_S),
        (lambda: grpc_server(of_bngrad=True, tls=True), "{} speaks TLS", TIMEOUT_S),
        (lambda: listener(lambda connection: connection.close()), "{} is no gRPC server: ", TIMEOUT_S),
        (lambda: listener(lambda connection: None), "{} does not answer within 2 s: it hangs, or is no gRPC server", 2),
        (web_server, "{} is no gRPC server: ", TIMEOUT_S),
    ],
)
def test_check_says_why_another_program_is_no_bngrad_server(
    peer: Callable[[], Any], complaint: str, timeout_s: float
) -> None:
    with peer() as address:
        ended = run_bngrad("check", address, "--timeout", str(timeout_s))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("✗ health   " + complaint.format(address))
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["check", "info", "bench"])
@pytest.mark.parametrize(
    ("target", "complaint", "code"),
    [
        ("nowhere.invalid:50051", "names no host that is known here", 1),
        ("localhost:1", "nothing listens on localhost:1: is `bngrad serve` running there?", 1),
        ("unix:/nowhere.sock", "unix:/nowhere.sock cannot be reached: No such file or directory", 1),
        (f"unix:/{'long/' * 25}socket", "socket cannot be reached: AF_UNIX path too long", 1),
        ("localhost:99999", "it should be HOST:PORT or unix:PATH, with a port of at most 65535, not", 2),
        ("http://localhost:1", "it should be HOST:PORT or unix:PATH", 2),
    ],
)
def test_a_wrong_target_is_reported_without_a_traceback(command: str, target: str, complaint: str, code: int) -> None:
    ended = run_bngrad(command, target)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("is_authority", "hint"), [(True, "it speaks none, so leave out the options of TLS"), (False, "has nothing of use")]
)
def test_a_hint_says_why_tls_does_not_work(
    server: EmbeddedServer, tmp_path: Path, is_authority: bool, hint: str
) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(trustme.CA().cert_pem.bytes() if is_authority else b"something else")
    ended = run_bngrad("check", "--tls-ca", str(file), "--timeout", str(TIMEOUT_S), server.target)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert hint in ended.stderr


def test_info_describes_the_server(server: EmbeddedServer, target: str) -> None:
    text = run_bngrad("info", target, "--timeout", str(TIMEOUT_S)).stdout
    said = json.loads(run_bngrad("info", target, "--json", "--timeout", str(TIMEOUT_S)).stdout)
    with bngrad.Client(target) as client:
        info = client.server_info()
    assert text.startswith(f"bngrad {__version__} on {target}: SERVING\n")
    assert (said["target"], said["health"], said["version"]) == (target, "SERVING", __version__)
    assert [device["name"] for device in said["devices"]] == [device.name for device in info.devices]
    assert said["stream_port"] == info.stream_port > 0
    assert re.search(r"^SDK connects to +the address that it is given$", text, re.MULTILINE)
    assert Path(said["local_directory"]).is_dir()
    for device in info.devices:
        assert f"ready, restarted {device.restarts} times: {device.description}\n" in text


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("--workers=1", "a socket beside the shared memory; elsewhere the address that it is given, by grpcio"),
        ("--shared-bytes=0", "the address that it is given, by grpcio"),
    ],
)
def test_info_says_where_the_sdk_connects_to_a_server_without_a_port(tmp_path: Path, option: str, place: str) -> None:
    address = f"unix:{tmp_path}/socket"
    with EmbeddedServer(address, options=(option,)):
        text = run_bngrad("info", address, "--timeout", str(TIMEOUT_S)).stdout
    assert re.search(rf"^SDK connects to +{place}$", text, re.MULTILINE)


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    with EmbeddedServer(options=("--workers=1", "--threads=1")) as server, bngrad.Client(server.target) as client:
        os.kill(worker_pid(server), signal.SIGKILL)
        wait_until(lambda: [(each.state, each.restarts) for each in client.server_info().devices] == [("ready", 1)])
        info, check = (run_bngrad(name, server.target, "--timeout=60").stdout for name in ("info", "check"))
    assert re.search("ready, restarted 1 time: .*, 1 thread$", info, re.MULTILINE)
    assert re.search("1 of 1 device ready, restarted 1 time$", check, re.MULTILINE)


def test_bench_prints_a_line_for_each_layer_and_transport_in_a_narrow_terminal_too(target: str) -> None:
    arguments = ("bench", target, "--seconds", "0.05", "--layer", "tiny", "--layer", "conv4-3x3", "--dtype", "float16")
    ended = run_bngrad(*arguments, environment={"COLUMNS": "40"})
    assert (ended.returncode, ended.stderr) == (0, "")
    ways = re.findall(r"(\w+)(?: +[0-9.]+){5} *$", ended.stdout, re.MULTILINE)
    assert ways == 2 * ["auto", "shared", "stream", "unary"]


@pytest.mark.parametrize("transport", ["auto", "shared", "stream", "unary"])
def test_bench_in_json_has_percentiles_and_rates(server: EmbeddedServer, transport: Transport) -> None:
    arguments = ("--seconds", "0.2", "--layer", "tiny", "--transport", transport, "--concurrency", "3", "--json")
    ended = run_bngrad("bench", server.target, *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    said = json.loads(ended.stdout)
    (measurement,) = said["measurements"]
    assert (said["concurrency"], measurement["transport"], measurement["shape"]) == (3, transport, [4, 4, 4, 16])
    assert measurement["error"] is None
    assert measurement["requests"] >= 3
    assert 0 < measurement["p50_ms"] <= measurement["p90_ms"] <= measurement["p99_ms"]
    assert measurement["gigabytes_per_s"] == pytest.approx(
        measurement["requests_per_s"] * (3 * 4 * 4 * 4 * 16 + 5 * 16) * 4 / 1e9
    )


def test_bench_goes_on_when_a_request_is_too_large_for_a_transport() -> None:
    with EmbeddedServer(options=(*ONE_WORKER, "--max-message-bytes", "4MiB", "--shared-bytes", "0")) as server:
        ended = run_bngrad("bench", server.target, "--seconds", "0.01", "--layer", "conv5-1x1", "--json")
    assert ended.returncode == 0, ended.stderr
    errors = {each["transport"]: each["error"] for each in json.loads(ended.stdout)["measurements"]}
    assert errors["auto"] is errors["stream"] is None
    assert "RESOURCE_EXHAUSTED" in errors["unary"]
    assert "; leave out transport='unary', or give the server a larger --max-message-bytes" in errors["unary"]
    assert "shares no memory" in errors["shared"]


def test_bench_that_is_interrupted_prints_what_it_has(server: EmbeddedServer) -> None:
    arguments = (*BNGRAD, "bench", server.target, "--seconds", "600", "--layer", "tiny", "--json")
    with bngrad.Client(server.target) as client:

        def computed() -> int:
            return sum(client.server_info().batch_sizes)

        before = computed()
        with interruptible(arguments, stderr=subprocess.PIPE) as process:
            wait_until(lambda: computed() > before + 20)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (130, "")
    (measurement,) = json.loads(output)["measurements"]
    assert measurement["requests"] > 0
    assert measurement["error"] is None


def test_bench_ends_at_once_by_sigterm(server: EmbeddedServer) -> None:
    arguments = (*BNGRAD, "bench", server.target, "--seconds", "600", "--layer", "tiny")
    with bngrad.Client(server.target) as client:
        before = sum(client.server_info().batch_sizes)
        with interruptible(arguments, stderr=subprocess.PIPE) as process:
            wait_until(lambda: sum(client.server_info().batch_sizes) > before + 20)
            process.terminate()
            output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output, errors) == (143, "", "")


def test_bench_stops_when_the_server_dies(own_server: EmbeddedServer) -> None:
    arguments = (*BNGRAD, "bench", own_server.target, "--seconds", "600", "--layer", "tiny", "--timeout", "3")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        with bngrad.Client(own_server.target) as client:
            wait_until(lambda: sum(client.server_info().batch_sizes) > 20)
        own_server.process.kill()
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert errors.startswith(f"Error: {own_server.target} ")
    assert "tiny" in output


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bngrad se", {"serve"}),
        ("bngrad c", {"check", "config", "completion"}),
        ("bngrad serve --max-w", {"--max-wait"}),
        ("bngrad bench --layer conv2", {"conv2-3x3", "conv2-1x1"}),
        ("bngrad completion f", {"fish"}),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, expected: set[str]) -> None:
    program = tmp_path / "bngrad"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bngrad_cli "$@"\n')
    program.chmod(0o755)
    words = line.split()
    script = f"""
        source <(bngrad completion bash)
        COMP_WORDS=({line}) COMP_CWORD={len(words) - 1}
        _bngrad_completion bngrad {words[-1]} {words[-2]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert expected <= set(ended.stdout.split())
    assert all(word.startswith(words[-1]) for word in ended.stdout.split())


def completions(folder: Path, command: list[str]) -> str:
    """Returns what a shell's command prints, which finds bngrad on its path and no configuration."""
    shell = shutil.which(command[0])
    if shell is None and not os.environ.get("BNGRAD_REQUIRE_SHELLS"):
        pytest.skip(f"{command[0]} is not installed")
    assert shell is not None, f"{command[0]} must be installed"
    program = folder / "bngrad"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bngrad_cli "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    ended = subprocess.run([shell, *command[1:]], env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bngrad conf", "config\tPrints the settings in effect, and where they come from.\n"),
        ("bngrad check --tls-ca FOLDER/a,b/", "FOLDER/a,b/ca.pem\n"),
    ],
)
def test_fish_completes_past_a_comma(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a,b" / "ca.pem").touch()
    line, expected = (text.replace("FOLDER", str(tmp_path)) for text in (line, expected))
    assert completions(tmp_path, ["fish", "-c", f"bngrad completion fish | source; complete -C '{line}'"]) == expected


def test_zsh_takes_the_script_without_a_configuration_of_its_own(tmp_path: Path) -> None:
    script = 'eval "$(bngrad completion zsh)"; print ${_comps[bngrad]}'
    assert completions(tmp_path, ["zsh", "-f", "-c", script]) == "_bngrad_completion\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_asks_bngrad(shell: str) -> None:
    assert "_BNGRAD_COMPLETE" in run_bngrad("completion", shell).stdout
    words = {"zsh": "bngrad se", "fish": "bngrad"}[shell]
    asked = {
        "_BNGRAD_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": {"zsh": "1", "fish": "se"}[shell],
    }
    assert "serve" in run_bngrad(environment=asked).stdout
