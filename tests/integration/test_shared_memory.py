"""Memory that client and server share: when either dies, nothing leaks and other calls go on."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tests.integration.problems import Case, Inputs, assert_same_bits, random_inputs
from tests.integration.status_details import violations
from tests.servers import (
    DEVICE,
    ONE_WORKER,
    Transport,
    endpoints_of,
    free_port,
    is_running,
    python,
    regions_of,
    wait_until,
    worker_pid,
    worker_pids,
)

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import FLOAT32
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire.limits import REGION_NBYTES

CASE = Case("v2", "NHWC", (32, 14, 14, 64))
INPUTS = random_inputs(CASE.spec())
NBYTES = CASE.spec().tensor_nbytes
VICTIM = """
import sys, threading
import numpy as np
import bngrad
client = bngrad.Client(sys.argv[1], transport="shared")
y, x, out = (client.empty((32, 56, 56, 64)) for _ in range(3))
y[...] = x[...] = 1
stats = np.ones(64, np.float32)
def call():
    while True:
        client.fused_batch_norm_grad_v2(y, x, stats, stats, stats)
client.fused_batch_norm_grad_v2(y, x, stats, stats, stats, out=out)
for _ in range(4):
    threading.Thread(target=call).start()
print("ready", flush=True)
"""

FORKED = """
import os, sys, threading
import numpy as np
import bngrad
x, stats = np.ones((32, 14, 14, 64), np.float32), np.ones(64, np.float32)
parent_ends, parent_lives = os.pipe()
with bngrad.Client(sys.argv[1], transport="shared") as client:
    client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
    if os.fork() == 0:
        os.close(parent_lives)
        os.read(parent_ends, 1)
        os._exit(0)
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def expected(server: EmbeddedServer) -> tuple[Any, ...]:
    with bngrad.Client(server.target, transport="unary") as client:
        outputs: tuple[Any, ...] = CASE.run(client, INPUTS)
        return outputs


def shared_inputs(client: bngrad.Client) -> Inputs:
    inputs = INPUTS._replace(y_backprop=client.empty(CASE.shape), x=client.empty(CASE.shape))
    inputs.y_backprop[...], inputs.x[...] = INPUTS[:2]
    return inputs


def shared_bytes_of(server: EmbeddedServer) -> int:
    """The bytes of shared memory that both of a server's processes map."""
    processes = (server.process.pid, worker_pid(server))
    return max(psutil.Process(pid).memory_info().shared for pid in processes)


def test_the_memory_of_a_client_that_is_killed_during_calls_is_freed(own_server: EmbeddedServer) -> None:
    processes = own_server.process.pid, worker_pid(own_server)
    with bngrad.Client(own_server.target, transport="stream") as client:
        expected = CASE.run(client, INPUTS)
        before = shared_bytes_of(own_server)
        with python(VICTIM, own_server.target) as victim:
            assert all(regions_of(pid) for pid in processes)
            assert shared_bytes_of(own_server) > before + 50 * 2**20
            victim.kill()
            victim.wait()
            wait_until(lambda: not any(regions_of(pid) for pid in processes))
            wait_until(lambda: shared_bytes_of(own_server) < before + 10 * 2**20)
        assert_same_bits(CASE.run(client, INPUTS), expected)
    assert not [name for name in os.listdir("/dev/shm") if "region" in name or "arena" in name]


def test_closing_a_client_ends_its_leases_despite_a_forked_child(own_server: EmbeddedServer) -> None:
    with python(FORKED, own_server.target):
        wait_until(lambda: not regions_of(worker_pid(own_server)))
        assert regions_of(own_server.process.pid)  # the child still has the memory mapped, so it counts
    wait_until(lambda: not regions_of(own_server.process.pid))


def test_arrays_stay_usable_after_their_client_is_closed(own_server: EmbeddedServer) -> None:
    with bngrad.Client(own_server.target, transport="shared") as client:
        inputs = shared_inputs(client)
        outputs = CASE.run(client, inputs)
    wait_until(lambda: not regions_of(worker_pid(own_server)))
    kept = [output.copy() for output in outputs]
    assert_same_bits(inputs, INPUTS)
    inputs.x[...] = 7
    with bngrad.Client(own_server.target, transport="shared") as client:
        assert_same_bits(CASE.run(client, INPUTS, out=inputs.x), outputs)
    assert_same_bits(outputs, tuple(kept))
    assert_same_bits((inputs.x,) * 3, (kept[0],) * 3)


@pytest.mark.parametrize("transport", ["auto", "stream", "shared"])
def test_a_client_survives_its_killed_server_and_finds_the_next_one(transport: Transport) -> None:
    with bngrad.Client("127.0.0.1:1", transport=transport) as client, pytest.raises(bngrad.UnavailableError):
        CASE.run(client, INPUTS)
    with (
        EmbeddedServer(f"127.0.0.1:{free_port()}", device=DEVICE, options=ONE_WORKER) as killed,
        bngrad.Client(killed.target, transport=transport, retries=False) as client,
    ):
        directory = Path(endpoints_of(killed.target).local_directory)
        inputs = shared_inputs(client)
        expected = CASE.run(client, inputs)
        worker = worker_pid(killed)
        killed.process.kill()
        killed.process.wait()
        wait_until(lambda: not is_running(worker))
        assert_same_bits(inputs, INPUTS)
        for each in (inputs, INPUTS):
            with pytest.raises(bngrad.UnavailableError):
                CASE.run(client, each)
        with EmbeddedServer(killed.target, device=DEVICE, options=ONE_WORKER) as successor:
            assert not directory.exists()
            assert Path(endpoints_of(successor.target).local_directory).exists()

            def is_answered() -> bool:
                with suppress(bngrad.UnavailableError):
                    return bool(CASE.run(client, INPUTS))
                return False

            wait_until(is_answered)
            out = client.empty(CASE.shape)
            for each in (INPUTS, inputs, shared_inputs(client)):
                assert_same_bits(CASE.run(client, each, out), expected)
            assert bool(regions_of(worker_pid(successor))) == (transport != "stream")
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(directory.name)]


@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_new_arrays_lie_in_the_memory_of_a_restarted_server(transport: Transport) -> None:
    with (
        EmbeddedServer(f"127.0.0.1:{free_port()}", device=DEVICE, options=ONE_WORKER) as killed,
        bngrad.Client(killed.target, transport=transport) as client,
    ):
        arrays = [client.empty((16 * 2**20,))]
        killed.process.kill()
        killed.process.wait()
        with EmbeddedServer(killed.target, device=DEVICE, options=ONE_WORKER) as successor:

            def is_shared() -> bool:
                with suppress(bngrad.UnavailableError):
                    arrays.append(client.empty((16 * 2**20,)))
                return bool(regions_of(successor.process.pid))

            wait_until(is_shared, poll_s=0.2)


def test_a_worker_that_is_killed_during_a_call_on_shared_memory_is_replaced(
    own_server: EmbeddedServer, expected: tuple[Any, ...]
) -> None:
    with bngrad.Client(own_server.target, transport="shared") as client, ThreadPoolExecutor() as threads:
        inputs, out = shared_inputs(client), client.empty(CASE.shape)
        for kills in (1, 2):
            out[...] = 0
            worker = worker_pid(own_server)
            os.kill(worker, signal.SIGSTOP)
            answer = threads.submit(CASE.run, client, inputs, out)
            with pytest.raises(FutureTimeoutError):
                answer.result(0.3)
            os.kill(worker, signal.SIGKILL)
            assert_same_bits(answer.result(60), expected)
            assert client.server_info().devices[0].restarts == kills


@pytest.mark.parametrize("shared_bytes", [0, REGION_NBYTES])
def test_with_too_little_shared_memory_auto_does_without_and_shared_fails(
    shared_bytes: int, expected: tuple[Any, ...]
) -> None:
    why = f"left of the {shared_bytes} bytes to share" if shared_bytes else "it is on another host, .* or shares none"
    with (
        EmbeddedServer(device=DEVICE, options=(*ONE_WORKER, "--shared-bytes", str(shared_bytes))) as server,
        bngrad.Client(server.target) as greedy,
    ):
        taken = greedy.empty(CASE.shape)  # and nothing of what there is to others
        with bngrad.Client(server.target) as client:
            inputs, out = shared_inputs(client), client.empty(CASE.shape)
            assert_same_bits(CASE.run(client, inputs, out), expected)
            assert_same_bits(CASE.run(client, INPUTS), expected)
        with bngrad.Client(server.target, transport="shared") as client:
            for use in (lambda: CASE.run(client, INPUTS), lambda: client.empty(CASE.shape)):
                with pytest.raises(bngrad.UnavailableError, match=why):
                    use()
        assert_same_bits(CASE.run(greedy, INPUTS, taken), expected)


def test_a_server_without_a_place_for_sockets_shares_no_memory_and_logs_why(expected: tuple[Any, ...]) -> None:
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    read_only = ["sh", "-c", 'mount -t tmpfs -o ro bngrad-test /dev/shm && exec "$@"', "sh"]
    serve = [sys.executable, "-m", "bngrad_cli", "serve", "--device", DEVICE, "--listen", "127.0.0.1:0", *ONE_WORKER]
    with (
        subprocess.Popen([*unshare, *read_only, *serve], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        target = server.stdout.readline().decode().split(" ready on ")[1].split(": ")[0]
        with bngrad.Client(target) as client:
            assert_same_bits(CASE.run(client, INPUTS), expected)
        server.terminate()
        log = server.communicate()[1].decode()
    assert server.returncode == 0
    assert "no memory is shared with clients on this host: [Errno 30] Read-only file system" in log
    assert "Traceback" not in log


def test_a_server_that_cannot_create_memory_is_unavailable_until_it_can(
    own_server: EmbeddedServer, expected: tuple[Any, ...]
) -> None:
    front, limit = own_server.process.pid, resource.RLIMIT_FSIZE
    soft, hard = resource.prlimit(front, limit, (REGION_NBYTES - 1, resource.RLIM_INFINITY))
    with bngrad.Client(own_server.target) as client:
        assert_same_bits(CASE.run(client, INPUTS), expected)
    with (
        bngrad.Client(own_server.target, transport="shared") as client,
        bngrad.Client(own_server.target, transport="shared", retries=False) as impatient,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(CASE.run, client, INPUTS)
        for use in (lambda: CASE.run(impatient, INPUTS), lambda: impatient.empty(CASE.shape)):
            with pytest.raises(bngrad.UnavailableError, match="no file left"):
                use()
        assert not waiting.done()
        resource.prlimit(front, limit, (soft, hard))
        assert_same_bits(waiting.result(), expected)


def test_memory_of_a_closed_client_is_reused(expected: tuple[Any, ...]) -> None:
    with EmbeddedServer(device=DEVICE, options=(*ONE_WORKER, "--shared-bytes", str(100 * 2**20))) as server:
        for _ in range(5):  # each leases 64 MiB
            with bngrad.Client(server.target, transport="shared") as client:
                assert_same_bits(CASE.run(client, INPUTS), expected)
            wait_until(lambda: not regions_of(server.process.pid))


class Lease:
    """A region leased without the SDK, as another client could."""

    def __init__(self, target: str, nbytes: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(f"{endpoints_of(target).local_directory}/regions")
        self.socket.sendall(struct.pack("<Q", nbytes))
        self.key, (self.fd,), *_ = socket.recv_fds(self.socket, 16, 1)
        self.memory = mmap.mmap(self.fd, nbytes)

    def request(self, **places: tuple[bytes, int]) -> pb.FusedBatchNormGradV2Request:
        """A request whose tensors lie in regions, given by key and offset for each field."""
        locations = {field: pb.Location(region_key=key, offset=offset) for field, (key, offset) in places.items()}
        message = pb.FusedBatchNormGradV2Request(x_backprop_location=locations.get("x_backprop_location"))
        for field, array in zip(INPUTS._fields, INPUTS, strict=True):
            tensor = getattr(message, field)
            tensor.MergeFrom(pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=array.shape))
            if field in locations:
                tensor.location.CopyFrom(locations[field])
            else:
                tensor.data = array.tobytes()
        return message


@pytest.fixture
def lease(server: EmbeddedServer) -> Iterator[Lease]:
    lease = Lease(server.target, 4 * NBYTES)
    yield lease
    lease.socket.close()


@pytest.fixture(scope="module")
def stub(server: EmbeddedServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.target) as channel:
        yield pb_grpc.BatchNormGradServiceStub(channel)


@pytest.mark.parametrize(
    ("places", "field", "description"),
    [
        ({"x": (bytes(16), 0)}, "x", "has the key of no region that is leased"),
        ({"x": (b"", 0)}, "x", "has the key of no region that is leased"),
        ({"x": ("key", 32)}, "x", "must begin at a multiple of 64 bytes, not at 32"),
        ({"x": ("key", -64)}, "x", "must begin at a multiple of 64 bytes, not at -64"),
        ({"x": ("key", 3 * NBYTES + 64)}, "x", f"must end within the region's {4 * NBYTES} bytes, not at"),
        ({"y_backprop": ("key", 2**63 - 64)}, "y_backprop", "must end within the region's"),
        ({"x_backprop_location": ("key", 4 * NBYTES)}, "x_backprop_location", "must end within the region's"),
        ({"x": ("key", 0), "x_backprop_location": ("key", 0)}, "x_backprop_location", "must not overlap x"),
        (
            {"y_backprop": ("key", NBYTES), "x_backprop_location": ("key", 2 * NBYTES - 64)},
            "x_backprop_location",
            "must not overlap y_backprop",
        ),
        ({"scale": ("key", 0)}, "scale", "scale must not have a location"),
    ],
)
def test_a_location_outside_the_callers_regions_is_refused(
    lease: Lease, stub: Any, places: dict[str, tuple[Any, int]], field: str, description: str
) -> None:
    mine = {name: (lease.key if key == "key" else key, offset) for name, (key, offset) in places.items()}
    with pytest.raises(grpc.RpcError) as refused:
        stub.FusedBatchNormGradV2(lease.request(**mine))
    ((named, told),) = violations(refused.value).items()
    assert named == field
    assert description in told


def test_a_key_is_invalid_after_its_lease(lease: Lease, stub: Any) -> None:
    message = lease.request(x=(lease.key, 0))
    stub.FusedBatchNormGradV2(message)
    lease.socket.close()

    def is_refused() -> bool:
        try:
            stub.FusedBatchNormGradV2(message)
        except grpc.RpcError as error:
            return "the key of no region" in violations(error)["x"]
        return False

    wait_until(is_refused)


def test_a_client_cannot_unmap_memory_that_a_worker_uses(
    lease: Lease, stub: Any, server: EmbeddedServer, expected: tuple[Any, ...]
) -> None:
    for nbytes in (0, 5 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(lease.fd, nbytes)
    lease.memory[: 2 * NBYTES] = INPUTS.y_backprop.tobytes() + INPUTS.x.tobytes()
    places = {"y_backprop": 0, "x": NBYTES, "x_backprop_location": 2 * NBYTES}
    message = lease.request(**{field: (lease.key, offset) for field, offset in places.items()})
    workers = worker_pids(server)
    os.close(lease.fd)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        with bngrad.Client(server.target) as client:
            answer = stub.FusedBatchNormGradV2.future(message)
            wait_until(lambda: client.server_info().requests == 1)
            lease.socket.close()  # the request holds the region until it is answered
            client.server_info()
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    response = answer.result()
    x_backprop = np.frombuffer(lease.memory, FLOAT32, NBYTES // 4, 2 * NBYTES).reshape(CASE.shape)
    stats = [np.frombuffer(tensor.data, np.float32) for tensor in (response.scale_backprop, response.offset_backprop)]
    assert_same_bits((x_backprop, *stats), expected)
    assert response.x_backprop.location == message.x_backprop_location
    assert worker_pids(server) == workers


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect_to_either_socket(server: EmbeddedServer) -> None:
    code = """if True:
        import os, socket, sys
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        for path in sys.argv[1:]:
            try:
                socket.socket(socket.AF_UNIX).connect(path)
            except PermissionError:
                print("denied")
    """
    directory = endpoints_of(server.target).local_directory
    command = [sys.executable, "-W", "ignore", "-c", code, f"{directory}/calls", f"{directory}/regions"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "denied\n" * 2
