"""Calls that are computed in this process: the target ``local:``, and the fallback of a client whose servers died."""

from __future__ import annotations

import functools
import logging
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.problems import Case, Inputs, random_inputs
from tests.integration.second_order import CASES, arguments, inputs_of, spec_of
from tests.kernels.cold_cache import assert_prints_the_same
from tests.servers import DEVICE, ONE_WORKER, TIMEOUT_S, free_port, wait_until

import bngrad
import bngrad.aio
from bngrad._balancing.resolver import Address
from bngrad._deadline import ENDLESS, Cancellation
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

DTYPES = [FLOAT16, BFLOAT16, FLOAT32]
FIRST_ORDER = [
    Case("v3", "NHWC", (4, 5, 6, 7)),
    Case("v3", "NCHW", (4, 7, 5, 6)),
    Case("v3", "NDHWC", (2, 3, 5, 6, 7)),
    Case("v3", "NCDHW", (2, 7, 3, 5, 6)),
    Case("v3", "NHWC", (0, 5, 6, 7)),
    Case("v3", "NHWC", (2, 5, 6, 0)),
    Case("v2", "NHWC", (16, 33, 33, 24)),
    Case("v2", "NCHW", (8, 24, 33, 33)),
    Case("onednn", "NXC", (4, 7)),
    Case("onednn", "NCX", (4, 7, 6)),
]


@pytest.fixture(scope="module")
def local() -> Iterator[bngrad.Client]:
    with bngrad.Client("local:") as client:
        yield client


@pytest.fixture(scope="module")
def remote(server: EmbeddedServer) -> Iterator[bngrad.Client]:
    with bngrad.Client(server.target) as client:
        yield client


def assert_same(ours: Any, theirs: Any) -> None:
    """Asserts that two results have the same class, dtypes, shapes and bits, and that ours may be written to."""
    assert type(ours) is type(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert (our.shape, our.dtype, our.flags.writeable) == (their.shape, their.dtype, True)
        assert our.tobytes() == their.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FIRST_ORDER, ids=str)
def test_the_first_order_has_a_servers_bits(
    local: bngrad.Client, remote: bngrad.Client, case: Case, dtype: np.dtype[Any]
) -> None:
    inputs = random_inputs(case.spec(dtype))
    assert_same(case.run(local, inputs), case.run(remote, inputs))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_second_order_has_a_servers_bits(
    local: bngrad.Client, remote: bngrad.Client, case: str, dtype: np.dtype[Any], is_training: bool
) -> None:
    given = {**inputs_of(spec_of(case, dtype)), **arguments(case), "is_training": is_training}
    assert_same(local.fused_batch_norm_grad_grad(**given), remote.fused_batch_norm_grad_grad(**given))


def test_a_call_that_was_cancelled_before_it_begins_is_not_computed(local: bngrad.Client) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(bngrad.UnavailableError, match="the call was cancelled"):
        local._calls.server_info(ENDLESS, cancellation)


CALLS: dict[str, Callable[[Any, Inputs], Any]] = {
    "inference": lambda client, inputs: client.fused_batch_norm_grad_v2(*inputs, is_training=False),
    "inverse std": lambda client, inputs: client.fused_batch_norm_grad_v2(*inputs, reserve_space_2_kind="inverse_std"),
    "third reserve": lambda client, inputs: client.fused_batch_norm_grad_v3(*inputs, np.ones(3, np.float32)),
    "priority": lambda client, inputs: client.fused_batch_norm_grad_v3(*inputs, None, epsilon=0, priority=3),
    "no gamma": lambda client, inputs: client.batch_norm_training_backprop(
        inputs.x, inputs.y_backprop, inputs.reserve_space_1, inputs.reserve_space_2, epsilon=0.1
    ),
    "inverse std for variance": lambda client, inputs: client.batch_norm_training_backprop(
        inputs.x, inputs.y_backprop, *inputs[3:], inputs.scale, epsilon=0.1, variance_kind="inverse_std"
    ),
    "bfloat16 statistics": lambda client, inputs: client.batch_norm_training_backprop(
        *(array.astype(BFLOAT16) for array in (inputs.x, inputs.y_backprop, *inputs[3:], inputs.scale)), epsilon=0.1
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_has_its_meaning(local: bngrad.Client, remote: bngrad.Client, name: str) -> None:
    inputs = random_inputs(Spec(FLOAT32, (4, 5, 6, 7), 3))
    assert_same(CALLS[name](local, inputs), CALLS[name](remote, inputs))


def unaligned(array: Any) -> Any:
    """Returns a copy whose elements lie at odd addresses."""
    memory = np.empty(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize(
    "change",
    [unaligned, np.asfortranarray, lambda array: np.repeat(array, 2, axis=0)[::2], lambda array: array.astype(">f4")],
    ids=["unaligned", "fortran", "strided", "big-endian"],
)
@pytest.mark.parametrize("shape", [(4, 5, 6, 7), (16, 33, 33, 48)], ids=str)
def test_inputs_and_outputs_may_lie_in_memory_in_any_way(
    local: bngrad.Client, change: Callable[[Any], Any], shape: tuple[int, ...]
) -> None:
    case = Case("v2", "NHWC", shape)
    inputs = random_inputs(case.spec())
    out = unaligned(inputs.x) if change is unaligned else np.asfortranarray(inputs.x)
    outputs = case.run(local, Inputs(*map(change, inputs)), out)
    assert outputs.x_backprop is out
    assert_same(outputs, case.run(local, inputs))


def test_tensors_with_the_channels_last_in_memory_are_computed_as_they_lie(
    local: bngrad.Client, remote: bngrad.Client
) -> None:
    case = Case("v3", "NCHW", (8, 24, 17, 17))
    inputs = random_inputs(case.spec())
    y_backprop, x = (np.moveaxis(np.moveaxis(array, 1, -1).copy(), -1, 1) for array in inputs[:2])
    given, out = inputs._replace(y_backprop=y_backprop, x=x), np.empty_like(x)
    outputs = case.run(local, given)
    assert outputs.x_backprop.strides == x.strides
    assert_same(outputs, case.run(remote, given))
    assert case.run(local, given, out).x_backprop is out
    assert_same(outputs, case.run(local, given, local.empty(out.shape)))


BAD: list[tuple[str, dict[str, Any]]] = [
    ("v3", {"x": np.ones((1, 2, 2, 4), np.float32)}),
    ("v3", {"x": np.ones((2, 2, 4), np.float32), "scale": np.ones((4, 1), np.float32)}),
    ("v3", {"x": np.ones((1,) * 40, np.float32)}),
    ("v3", {"y_backprop": np.ones((2, 2, 2, 4), np.float16), "reserve_space_1": np.ones(3, np.float32)}),
    ("v3", {"reserve_space_3": np.ones(3, np.float16)}),
    ("v3", {"scale": np.ones(4, np.int32)}),
    ("v3", {"scale": None}),
    ("v3", {"epsilon": -0.1, "data_format": "nhwc"}),
    ("v3", {"epsilon": "a"}),
    ("v3", {"priority": 9}),
    ("v3", {"out": np.ones((2, 2, 2, 3), np.float32)}),
    ("v3", {"timeout": -1}),
    ("v2", {"data_format": "NDHWC"}),
]


@pytest.mark.parametrize(("op", "changes"), BAD, ids=str)
def test_errors_are_a_servers(local: bngrad.Client, remote: bngrad.Client, op: str, changes: dict[str, Any]) -> None:
    tensor, stats = np.ones((2, 2, 2, 4), np.float32), np.ones(4, np.float32)
    given = {"y_backprop": tensor, "x": tensor, "scale": stats, "reserve_space_1": stats, "reserve_space_2": stats}
    given |= ({"reserve_space_3": None} if op == "v3" else {}) | changes
    errors = []
    for client in (local, remote):
        with pytest.raises((bngrad.InvalidArgumentError, TypeError)) as raised:
            getattr(client, f"fused_batch_norm_grad_{op}")(**given)
        errors.append((raised.type, str(raised.value), getattr(raised.value, "violations", ())))
    assert errors[0] == errors[1]


def test_many_threads_call_one_client(local: bngrad.Client) -> None:
    cases = [Case("v2", "NHWC", (4, 5, 6, 7)), Case("v2", "NCHW", (8, 24, 33, 33)), Case("v2", "NHWC", (8, 9, 9, 64))]
    inputs = [random_inputs(case.spec()) for case in cases]
    expected = [case.run(local, given) for case, given in zip(cases, inputs, strict=True)]

    def work(number: int) -> None:
        for i in range(number, number + 30):
            assert_same(cases[i % 3].run(local, inputs[i % 3]), expected[i % 3])

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, number) for number in range(8)]:
            done.result()


async def test_the_asynchronous_client_computes_here_as_well(local: bngrad.Client) -> None:
    case = Case("v3", "NHWC", (8, 33, 33, 24))
    inputs = random_inputs(case.spec())
    async with bngrad.aio.Client("local:") as client:
        assert_same(await case.run(client, inputs), case.run(local, inputs))
        assert (await client.server_info()).devices == local.server_info().devices
        assert (await client.empty((2, 3))).shape == (2, 3)


def test_the_client_describes_itself_and_ends_like_any_other(remote: bngrad.Client) -> None:
    client = bngrad.Client("local:", timeout=5, transport="shared", token="unused")  # noqa: S106 - no secret
    assert repr(client) == "bngrad.Client('local:')"
    ours, theirs = client.server_info(), remote.server_info()
    assert (ours.version, ours.ops) == (theirs.version, theirs.ops)
    assert [(device.name, device.state) for device in ours.devices] == [("cpu", "ready")]
    array = client.empty((3, 4), BFLOAT16)
    client.close()
    array[:] = 1
    with pytest.raises(bngrad.ClientClosedError):
        client.server_info()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


CALL = """
import sys, numpy, bngrad
def call(client):
    x, stats = numpy.ones((2, 2, 2, 4), numpy.float32), numpy.ones(4, numpy.float32)
    return client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
"""


def test_a_process_loads_nothing_before_it_is_used_and_its_forks_compute_too() -> None:
    """A forked process has none of the threads that have computed with its parent."""
    code = """
import os
def loaded():
    return [name for name in ("bngrad_kernels", "llvmlite") if name in sys.modules]
def call_large(client):
    x, stats = numpy.ones((64, 64, 64, 4), numpy.float32), numpy.ones(4, numpy.float32)
    return client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
bngrad.Client("localhost:1")
print(loaded())
client = bngrad.Client("localhost:1", fallback="local")
client = bngrad.Client("local:")
print(loaded())
call(client)
print(loaded(), flush=True)
expected = call_large(client)
if os.fork() == 0:
    try:
        call(client)
    except bngrad.ClientClosedError as error:
        print("forked" in str(error))
    computed = call_large(bngrad.Client("local:"))
    print(all(map(numpy.array_equal, computed, expected)), flush=True)
    os._exit(0)
os.wait()
"""
    loaded = ["[]", "['bngrad_kernels']", "['bngrad_kernels', 'llvmlite']"]
    assert python(CALL + code).splitlines() == [*loaded, "True", "True"]


def test_the_bits_are_the_same_while_the_kernel_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import numpy, bngrad
y_backprop, x, y_odd, x_odd = numpy.random.default_rng(0).normal(size=(4, 5, 6, 7, 8)).astype(numpy.float32)
per_channel = numpy.linspace(0.5, 2, 8).astype(numpy.float32)
client = bngrad.Client("local:")
plain = client.fused_batch_norm_grad_v2(y_backprop, x, *[per_channel] * 3)
other = client.batch_norm_training_backprop(x_odd[:, ::2], y_odd[:, ::2], per_channel, per_channel, epsilon=1e-3)
print([output.tobytes().hex() for output in (*plain, *other)])
print(client.server_info().compiling)
"""
    assert_prints_the_same(code, tmp_path, monkeypatch)


def test_a_kernel_that_cannot_be_compiled_is_a_warning() -> None:
    code = """
import logging, os, time
os.environ["NUMBA_CPU_NAME"] = "no-such-processor"
logging.basicConfig(stream=sys.stdout, format="%(message)s")
client = bngrad.Client("local:")
call(client)
while client.server_info().compiling:
    time.sleep(0.05)
"""
    said = python(CALL + code)
    assert said.startswith("the kernel float32-1 could not be compiled: LLVM")
    assert said.endswith("; NumPy computes what needs it\n")


def test_a_large_tensor_of_the_second_order_without_a_kernel_is_an_error_of_the_client() -> None:
    code = """
import os
os.environ["NUMBA_CPU_NAME"] = "no-such-processor"
from bngrad_kernels.cpu.uncompiled import backend
backend._MAX_SECOND_ORDER_ELEMENTS = 1
x, sums = numpy.ones((2, 2, 2, 4), numpy.float32), numpy.ones(4, numpy.float32)
try:
    bngrad.Client("local:").fused_batch_norm_grad_grad(x, sums, sums, x, x, sums, sums, sums)
except bngrad.UnavailableError as error:
    print(error)
"""
    assert python(CALL + code).startswith("the kernel float32-2 could not be compiled: LLVM")


@pytest.mark.parametrize("arguments", ["'local:'", "'localhost:1', fallback='local'"])
def test_missing_numba_is_said_when_the_client_is_made(arguments: str) -> None:
    code = f"""
sys.modules["numba"] = None
try:
    bngrad.Client({arguments})
except ModuleNotFoundError as error:
    print(error)
"""
    assert "pip install '.[local]' in a checkout of bngrad" in python(CALL + code)


def test_calls_are_computed_here_while_the_server_is_dead(caplog: pytest.LogCaptureFixture) -> None:
    case = Case("v3", "NHWC", (16, 33, 33, 24))
    inputs = random_inputs(case.spec())
    address = f"127.0.0.1:{free_port()}"
    serve = functools.partial(EmbeddedServer, address, device=DEVICE, options=ONE_WORKER)
    with bngrad.Client(address, timeout=1, fallback="local") as client, caplog.at_level(logging.WARNING, "bngrad"):
        with serve() as server:
            expected = case.run(client, inputs, timeout=60)
            assert client.fallback_calls == 0
            server.process.kill()
            server.process.wait()
            for calls in range(1, 4):
                assert_same(case.run(client, inputs), expected)
                assert client.fallback_calls == calls
            assert client.empty(3).shape == (3,)
            with pytest.raises(bngrad.InvalidArgumentError, match="scale must have the same number of elements"):
                case.run(client, inputs._replace(scale=inputs.scale[1:]))
            with pytest.raises(bngrad.UnavailableError):
                client.server_info()

        def is_answered_by_the_server() -> bool:
            before = client.fallback_calls
            assert_same(case.run(client, inputs), expected)
            return client.fallback_calls == before

        with serve():
            wait_until(is_answered_by_the_server)
    (record,) = caplog.records
    assert "computes calls in this process while no server answers" in record.message
    assert address in record.message


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_no_call_with_a_fallback_waits_for_its_timeout(is_killed: bool) -> None:
    case = Case("v3", "NHWC", (16, 33, 33, 24))
    inputs = random_inputs(case.spec())
    with (
        EmbeddedServer(device=DEVICE, options=ONE_WORKER) as server,
        bngrad.Client(server.target, timeout=300, fallback="local") as client,
    ):
        expected = case.run(client, inputs)

        def is_frozen() -> bool:
            """Whether all threads have stopped: each one does when it is its turn, and until then may answer."""
            threads = Path(f"/proc/{server.process.pid}/task").glob("*/stat")
            return {each.read_text().rpartition(")")[2].split()[0] for each in threads} == {"T"}

        server.process.send_signal(signal.SIGKILL if is_killed else signal.SIGSTOP)
        wait_until(lambda: is_killed or is_frozen())
        try:
            began = time.monotonic()
            assert_same(case.run(client, inputs), expected)
            assert time.monotonic() - began < TIMEOUT_S
            assert client.fallback_calls == 1
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_closing_frees_the_memory_of_a_fallback() -> None:
    case = Case("v3", "NHWC", (16, 33, 33, 24))
    with bngrad.Client(f"127.0.0.1:{free_port()}", fallback="local") as client:
        case.run(client, random_inputs(case.spec()))
        fallback = client._calls._fallback
        assert fallback is not None
        (region,) = map(weakref.ref, fallback.kernels._pool._regions)
    assert region() is None


def test_without_a_fallback_a_dead_server_is_an_error() -> None:
    case = Case("v3", "NHWC", (2, 2, 2, 4))
    with bngrad.Client(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(bngrad.UnavailableError):
            case.run(client, random_inputs(case.spec(FLOAT32)))
        assert client.fallback_calls == 0


async def test_the_asynchronous_client_falls_back_too() -> None:
    case = Case("v2", "NHWC", (2, 2, 2, 4))
    inputs = random_inputs(case.spec())
    async with bngrad.aio.Client(f"127.0.0.1:{free_port()}", fallback="local") as client:
        with bngrad.Client("local:") as local:
            assert_same(await case.run(client, inputs), case.run(local, inputs))
        assert client.fallback_calls == 1


def test_a_fallback_of_another_name_is_refused() -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="fallback must be 'local' or None, not 'cpu'"):
        bngrad.Client("localhost:1", fallback="cpu")  # type: ignore[arg-type]


def test_local_takes_its_share_of_calls_beside_servers(server: EmbeddedServer) -> None:
    case = Case("v2", "NHWC", (2, 2, 2, 4))
    inputs = random_inputs(case.spec())
    with bngrad.Client([server.target, "local:"]) as client:
        first = case.run(client, inputs)
        for _ in range(5):
            assert_same(case.run(client, inputs), first)


def test_local_computes_again_once_it_is_back_among_the_servers_of_a_large_fleet() -> None:
    case = Case("v3", "NHWC", (16, 33, 33, 24))
    inputs = random_inputs(case.spec())
    with bngrad.Client(["local:", "127.0.0.1:1"]) as client, bngrad.Client("local:") as local:
        for members in ["127.0.0.1:1"], ["local:"]:
            client._calls._load_balancer._use([Address(target) for target in members])
        assert_same(case.run(client, inputs), case.run(local, inputs))
