"""Servers with GPU workers; without a GPU, a CPU runs the source of the CUDA kernels in the workers."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration.problems import assert_gradients, assert_same_bits, random_inputs
from tests.integration.second_order import arguments, inputs_of, spec_of
from tests.integration.second_order import assert_within_bounds as assert_second_order
from tests.kernels.cuda.devices import EmulatedDevice, library_file
from tests.servers import regions_of, wait_until, worker_pid

import bngrad
from bngrad.typing import DataFormat4D, Transport
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels import backends
from bngrad_kernels.cuda import CudaBackend
from bngrad_kernels.problem import AnyProblem, Array, GradGradProblem, Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

ROOT = Path(__file__).parents[2]
ARENA = ("--arena-bytes", "64MiB")
NONE_BRIEF = (*ARENA, "--max-batch-bytes", "1KiB")
"""Small requests do not wait for each other: a GPU computes two of them at once."""
RESERVE = 2**22
"""What it has in addition, for small requests."""
SPEC = Spec(FLOAT32, (4, 9, 9, 48), 3)
INPUTS = random_inputs(SPEC)
SLOW = random_inputs(Spec(FLOAT16, (4, 9, 9, 48), 3))
"""The request that waits at the gate."""
DEADLY = random_inputs(Spec(BFLOAT16, (4, 9, 9, 48), 3))
"""The request that kills its worker, while a file says so."""


@pytest.fixture(scope="module")
def kernels() -> Path:
    return library_file()


@pytest.fixture(scope="module", autouse=True)
def gpus(kernels: Path) -> Iterator[None]:
    """Makes servers that the tests start find GPUs."""
    path = [str(Path(__file__).parent / "emulated"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("EMULATED_KERNELS", str(kernels))
        yield


@pytest.fixture(scope="module")
def server(gpus: None) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(device="auto", options=ARENA) as server:
        yield server


def by_the_kernels(kernels: Path, made: AnyProblem) -> tuple[Array, ...]:
    """What the CUDA kernels compute in this process."""
    backend = CudaBackend(EmulatedDevice(kernels=ctypes.CDLL(str(kernels))))
    backend.warm_up()
    backend.run([made])
    return tuple(getattr(made, name) for name in made.large_outputs + made.small_outputs)


def test_auto_uses_every_usable_gpu_and_says_why_not_the_others(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target) as client:
        info = client.server_info()
    assert [(each.name, each.description, each.state, each.memory_bytes) for each in info.devices] == [
        (f"cuda:{number}", f"emulated GPU {number}", "ready", 8 << 30) for number in (0, 1)
    ]
    assert info.device_remark == "cuda:2: its compute capability 6.1 is too old"
    assert "computing on cuda:0, cuda:1: cuda:2: its compute capability 6.1 is too old" in server.stderr()


def test_every_transport_gives_the_cuda_kernels_bits(server: EmbeddedServer, kernels: Path) -> None:
    transports: list[Transport] = ["auto", "unary", "stream", "shared"]
    layouts: list[tuple[tuple[int, ...], int, DataFormat4D]]
    layouts = [((4, 9, 9, 48), 3, "NHWC"), ((2, 96, 80, 80), 1, "NCHW")]
    for dtype in (FLOAT16, BFLOAT16, FLOAT32):
        for shape, axis, data_format in layouts:
            for is_training in (True, False):
                spec = Spec(dtype, shape, axis, is_training=is_training)
                inputs = random_inputs(spec)
                expected = by_the_kernels(kernels, Problem.allocate(spec, *inputs))
                for transport in transports:
                    with bngrad.Client(server.target, transport=transport) as client:
                        outputs = client.fused_batch_norm_grad_v2(
                            *inputs, data_format=data_format, is_training=is_training
                        )
                    assert_same_bits(outputs, expected)
                assert_gradients(spec, inputs, expected)


def test_every_transport_gives_the_cuda_kernels_bits_of_the_second_order(server: EmbeddedServer, kernels: Path) -> None:
    transports: list[Transport] = ["auto", "unary", "stream", "shared"]
    for case, is_training in itertools.product(("NHWC", "NCHW", "NCDHW", "NCHW large"), (True, False)):
        spec = spec_of(case, is_training=is_training)
        expected = by_the_kernels(kernels, GradGradProblem.allocate(spec, **inputs_of(spec)))
        for transport in transports:
            with bngrad.Client(server.target, transport=transport) as client:
                outputs = client.fused_batch_norm_grad_grad(
                    **inputs_of(spec), **arguments(case), is_training=is_training
                )
            assert [ours.tobytes() for ours in outputs] == [theirs.tobytes() for theirs in expected]
        assert_second_order(spec, outputs)


def test_a_device_that_fails_ends_its_worker_and_its_work_is_run_again(kernels: Path) -> None:
    with EmbeddedServer(device="cuda:1", options=ARENA) as server, bngrad.Client(server.target) as client:
        before = client.fused_batch_norm_grad_v2(*INPUTS)
        (kernels.parent / "poison").touch()
        assert_same_bits(client.fused_batch_norm_grad_v2(*INPUTS), before)
        wait_until(lambda: client.server_info().devices[0].restarts == 1)
        wait_until(lambda: client.server_info().devices[0].state == "ready")
        assert_same_bits(client.fused_batch_norm_grad_v2(*INPUTS), before)
        sentence = "ended with exit code 1: emulated GPU 1 failed: an illegal memory access was encountered"
        wait_until(lambda: f"worker of device cuda:1 {sentence}" in server.stderr())


class Gate:
    """Blocks requests in the workers of one GPU until it is opened."""

    def __init__(self, server: EmbeddedServer, client: bngrad.Client) -> None:
        self._server = server
        self._client = client
        self._threads = ThreadPoolExecutor()
        self.held = 0

    def hold(self) -> Future[Any]:
        """Sends a request, and returns once it is blocked in the worker."""
        answer = self._threads.submit(self._client.fused_batch_norm_grad_v2, *SLOW)
        self.wait_until_held()
        return answer

    def wait_until_held(self) -> None:
        """Returns once one more request is blocked, in the worker that runs now."""
        self.held += 1
        wait_until(lambda: self._server.stderr().count("waits at the gate") == self.held)
        assert f"worker {worker_pid(self._server)} waits at the gate" in self._server.stderr().splitlines()

    def send(self, *inputs: Any) -> Future[Any]:
        """Sends a request that is not blocked."""
        return self._threads.submit(self._client.fused_batch_norm_grad_v2, *inputs)


@contextmanager
def gate(kernels: Path, server: EmbeddedServer, client: bngrad.Client) -> Iterator[Gate]:
    """Closed until the block ends."""
    with (kernels.parent / "gate").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield Gate(server, client)
    (kernels.parent / "gate").unlink()


def test_a_gpu_computes_two_batches_at_once_and_answers_the_one_that_is_done_first(kernels: Path) -> None:
    with EmbeddedServer(device="cuda:0", options=NONE_BRIEF) as server, bngrad.Client(server.target) as client:
        slow, fast = (client.fused_batch_norm_grad_v2(*inputs) for inputs in (SLOW, INPUTS))
        with gate(kernels, server, client) as closed:
            answer = closed.hold()
            with bngrad.Client(server.target, transport="shared") as other:  # whose memory both slots must map
                for _ in range(3):
                    assert_same_bits(other.fused_batch_norm_grad_v2(*INPUTS), fast)
            assert not answer.done()
            another = closed.hold()
            assert [device.name for device in client.server_info().devices] == ["cuda:0"]
        assert_same_bits(answer.result(60), slow)
        assert_same_bits(another.result(60), slow)
        assert client.server_info().devices[0].restarts == 0


def test_memory_that_a_client_shared_is_mapped_until_every_slot_has_removed_it(kernels: Path) -> None:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server, bngrad.Client(server.target) as client:
        worker = worker_pid(server)
        with bngrad.Client(server.target, transport="shared") as other, gate(kernels, server, client) as closed:
            assert_gradients(SPEC, INPUTS, other.fused_batch_norm_grad_v2(*INPUTS))
            answer = closed.hold()
            other.close()
            wait_until(lambda: not regions_of(server.process.pid))
            assert regions_of(worker)  # the slot that is blocked is told of it only later
        answer.result(60)
        wait_until(lambda: not regions_of(worker))
        assert [server.stderr().count(word) for word in ("page-locked", "page-unlocked")] == [2, 1]  # and the arena


def test_memory_that_comes_and_goes_while_a_slot_is_held_does_not_wait_for_it(kernels: Path) -> None:
    with EmbeddedServer(device="cuda:0", options=NONE_BRIEF) as server, bngrad.Client(server.target) as client:
        worker = worker_pid(server)
        with gate(kernels, server, client) as closed:
            answer = closed.hold()
            with bngrad.Client(server.target, transport="shared") as other:
                assert_gradients(SPEC, INPUTS, other.fused_batch_norm_grad_v2(*INPUTS))
                assert regions_of(worker)
            wait_until(lambda: not regions_of(worker))
        answer.result(60)


@pytest.mark.parametrize("how", ["it is killed", "its device fails"])
def test_both_batches_run_again_where_their_worker_dies(kernels: Path, how: str) -> None:
    with EmbeddedServer(device="cuda:0", options=NONE_BRIEF) as server, bngrad.Client(server.target) as client:
        slow, fast = (client.fused_batch_norm_grad_v2(*inputs) for inputs in (SLOW, INPUTS))
        with gate(kernels, server, client) as closed:
            first = closed.hold()
            if how == "it is killed":
                second, expected = closed.hold(), slow
                os.kill(worker_pid(server), signal.SIGKILL)
            else:
                (kernels.parent / "poison").touch()
                second, expected = closed.send(*INPUTS), fast
            wait_until(lambda: client.server_info().devices[0].restarts == 1)
        assert_same_bits(first.result(60), slow)
        assert_same_bits(second.result(60), expected)
        assert client.server_info().devices[0].restarts == 1
        sentence = (
            "was killed by SIGKILL" if how == "it is killed" else "ended with exit code 1: emulated GPU 0 failed: an"
        )
        assert f"worker of device cuda:0 {sentence}" in server.stderr()


def test_a_request_that_kills_two_workers_is_given_up_and_not_the_one_beside_it(kernels: Path) -> None:
    deadly = kernels.parent / "deadly"
    with EmbeddedServer(device="cuda:0", options=NONE_BRIEF) as server, bngrad.Client(server.target) as client:
        slow, harmless = (client.fused_batch_norm_grad_v2(*inputs) for inputs in (SLOW, DEADLY))
        deadly.touch()
        with gate(kernels, server, client) as closed:
            innocent = closed.hold()
            poison = closed.send(*DEADLY)
            wait_until(lambda: client.server_info().devices[0].restarts == 1)
            closed.wait_until_held()  # again, and without the other
        assert_same_bits(innocent.result(60), slow)
        with pytest.raises(bngrad.InternalError, match="2 workers died while computing this request"):
            poison.result(60)
        deadly.unlink()
        assert_same_bits(client.fused_batch_norm_grad_v2(*DEADLY), harmless)
        assert client.server_info().devices[0].restarts == 2


def test_the_arena_and_shared_regions_are_page_locked_as_long_as_they_are_mapped() -> None:
    with EmbeddedServer(device="cuda:0", options=ARENA) as server:
        wait_until(lambda: f"page-locked {2**26 + RESERVE} bytes" in server.stderr())
        with bngrad.Client(server.target, transport="shared") as client:
            outputs = client.fused_batch_norm_grad_v2(*INPUTS)
            wait_until(lambda: server.stderr().count("page-locked") == 2)
        wait_until(lambda: "page-unlocked" in server.stderr())
        assert_gradients(SPEC, INPUTS, outputs)


def test_an_arena_of_the_default_size_can_be_page_locked_and_so_can_the_memory_that_a_client_shares() -> None:
    with EmbeddedServer(device="cuda:0", options=("--pinned-bytes", "128MiB")) as server:
        wait_until(lambda: f"page-locked {2**26 + RESERVE} bytes" in server.stderr())
        with bngrad.Client(server.target, transport="shared") as client:
            assert client.server_info().arena_bytes == 2**26
            client.fused_batch_norm_grad_v2(*INPUTS)
            assert server.stderr().count("page-locked ") == 2


@pytest.mark.parametrize(
    ("options", "refuses", "words"),
    [
        (("--pinned-bytes", "32MiB"), False, f"{2**25 + RESERVE} bytes are left of pinned_bytes"),
        ((), True, "out of memory"),
    ],
)
def test_memory_that_cannot_be_page_locked_is_logged_and_used_nonetheless(
    kernels: Path, options: tuple[str, ...], refuses: bool, words: str
) -> None:
    if refuses:
        (kernels.parent / "no-pinning").touch()
    try:
        with EmbeddedServer(device="cuda:0", options=(*ARENA, *options)) as server:
            line = f"the arena, {2**26 + RESERVE} bytes, is not page-locked, so its copies are slower: {words}"
            wait_until(lambda: line in server.stderr())
            with bngrad.Client(server.target) as client:
                assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))
    finally:
        (kernels.parent / "no-pinning").unlink(missing_ok=True)


@pytest.mark.skipif(backends.devices().names != ["cpu"], reason="there is a GPU")
class TestWithoutAGpu:
    @pytest.fixture(autouse=True)
    def as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("EMULATED_KERNELS")
        monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])

    def test_a_server_with_a_gpu_in_its_settings_does_not_start_and_says_why(self) -> None:
        command = [sys.executable, "-m", "bngrad_cli", "serve", "--device", "cuda:0", "--listen", "127.0.0.1:0"]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.splitlines()[-1].startswith("Error: device cuda:0 cannot be used: CU")
        assert ended.stderr.count("cuda:0") == 1
        assert "Traceback" not in ended.stderr

    def test_auto_computes_on_the_cpu_and_says_why(self) -> None:
        with EmbeddedServer(device="auto", options=ARENA) as server, bngrad.Client(server.target) as client:
            info = client.server_info()
            assert {each.name.partition(":")[0] for each in info.devices} == {"cpu"}
            assert {each.memory_bytes for each in info.devices} == {0}
            assert info.device_remark.startswith("CU")
            assert f"computing on cpu: {info.device_remark}" in server.stderr()
            assert_gradients(SPEC, INPUTS, client.fused_batch_norm_grad_v2(*INPUTS))
