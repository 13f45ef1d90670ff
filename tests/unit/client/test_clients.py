"""Both clients against a peer over a real socket."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import math
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from tests.servers import wait_until
from tests.unit.client.calls import SECONDS, START_THREAD, ClientClass, inputs, interrupt_after, no_thread, use
from tests.unit.client.peer import echo, info, peer

import bngrad
import bngrad.aio
from bngrad.typing import Transport
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import frames


def ask(
    client_class: ClientClass,
    target: str,
    *,
    timeout: float | None = None,
    client_timeout: float = 60,
    options: Sequence[tuple[str, Any]] = (),
) -> bngrad.ServerInfo:
    """Asks for the server's info by a new client."""
    made = client_class(target, timeout=client_timeout, options=options)
    answer: bngrad.ServerInfo = use(made, lambda client: client.server_info(timeout=timeout))
    return answer


def remaining(client_class: ClientClass, *, timeout: float | None = None, client_timeout: float = 60) -> float:
    """Returns the remaining seconds that the peer sees for a call."""
    seconds: list[float] = []

    def note(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        seconds.append(context.time_remaining())
        return info(method, request, context)

    with peer(note) as target:
        ask(client_class, target, timeout=timeout, client_timeout=client_timeout)
    return seconds[0]


class Held:
    """Holds every call until the block ends. Put it inside the peer's block, which waits for its calls."""

    def __init__(self) -> None:
        self.arrived, self.ended, self._released = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not context.add_callback(self.ended.set):  # the call has ended already
            self.ended.set()
        self.arrived.set()
        self._released.wait(SECONDS)
        return info(method, request, context)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._released.set()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix:"])
def test_a_call_returns_the_answer(client_class: ClientClass, address: str, tmp_path: Path) -> None:
    with peer(info, f"unix:{tmp_path}/socket" if address == "unix:" else address) as target:
        assert ask(client_class, target).version == "1.2.3"


@pytest.mark.parametrize(
    ("shape", "make_out"),
    [
        ((2, 3, 3, 4), lambda x: None),
        ((2, 3, 3, 4), lambda x: np.empty_like(x, order="F")),
        ((0, 3, 3, 4), np.empty_like),
        ((5, 256, 256, 4), lambda x: None),
        ((5, 256, 256, 4), np.empty_like),
    ],
    ids=["small", "small-strided-out", "none-out", "large", "large-out"],
)
@pytest.mark.parametrize("transport", ["auto", "unary", "stream"])
def test_every_transport_carries_tensors_of_any_size_both_ways(
    client_class: ClientClass, transport: Transport, shape: tuple[int, ...], make_out: Callable[[Any], Any]
) -> None:
    arrays = inputs(3, shape)
    out = make_out(arrays[1])
    with peer(echo) as target:
        client = client_class(target, transport=transport)
        results = use(client, lambda client: client.fused_batch_norm_grad_v2(*arrays, out=out))
    assert all(map(np.array_equal, results, arrays[1:]))
    assert out is None or results.x_backprop is out
    assert all(array.flags.writeable for array in results)


REQUEST_TYPES: dict[str, Any] = {
    "fused_batch_norm_grad_v3": pb.FusedBatchNormGradV3Request,
    "fused_batch_norm_grad_v2": pb.FusedBatchNormGradV2Request,
    "batch_norm_training_backprop": pb.BatchNormTrainingBackpropRequest,
    "fused_batch_norm_grad_grad": pb.FusedBatchNormGradGradRequest,
}


@pytest.mark.parametrize("method", REQUEST_TYPES)
def test_every_argument_goes_where_it_belongs(client_class: ClientClass, method: str) -> None:
    fields = REQUEST_TYPES[method].DESCRIPTOR.fields
    names = [field.name for field in fields if field.message_type is pb.Tensor.DESCRIPTOR]
    tensors = {name: np.full((1, 1, 1, 3), number, np.float32) for number, name in enumerate(names)}
    attributes: dict[str, Any] = {"epsilon": 0.25, "data_format": "NCX", "priority": -3}
    if "is_training" in inspect.signature(getattr(client_class, method)).parameters:
        attributes |= {"is_training": False, "reserve_space_2_kind": "inverse_std"}
    else:
        attributes["variance_kind"] = "inverse_std"
    requests: list[Any] = []
    seconds: list[float] = []

    def refuse_all(op: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        requests.append(REQUEST_TYPES[method].FromString(request))
        seconds.append(context.time_remaining())
        return context.abort(grpc.StatusCode.INTERNAL, "for a test")

    def call(client: Any, **options: Any) -> Any:
        return getattr(client, method)(**tensors, **attributes, **options)

    with peer(refuse_all) as target:
        with pytest.raises(bngrad.InternalError, match="for a test"):
            use(client_class(target, transport="unary"), lambda client: call(client, timeout=1000))
        out = np.empty(1, np.float32)
        outs = (None, out) if method == "fused_batch_norm_grad_grad" else out
        with pytest.raises(bngrad.InvalidArgumentError, match=r"^out.* must have shape \(1, 1, 1, 3\)"):
            use(client_class(target, transport="unary"), lambda client: call(client, out=outs))
    assert seconds == [pytest.approx(1000, abs=SECONDS)]
    (request,) = requests
    for name, array in tensors.items():
        sent = getattr(request, name)
        assert sent.data == (b"" if name == "reserve_space_3" else array.tobytes())
        assert list(sent.shape) == [1, 1, 1, 3]
    sent_as = {"inverse_std": pb.RESERVE_SPACE2_KIND_INVERSE_STD}
    assert all(getattr(request, name) == sent_as.get(value, value) for name, value in attributes.items())
    assert set(tensors) | set(attributes) >= {field.name for field in fields if not field.name.endswith("_location")}


def refuse(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
    """Refuses an op with all the details that bngrad gives."""
    if method == "ServerInfo":
        return info(method, request, context)
    violation = error_details_pb2.BadRequest.FieldViolation(field="x", description="x is wrong")
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    code, _ = grpc.StatusCode.INVALID_ARGUMENT.value
    status = status_pb2.Status(code=code, message="x is wrong", details=[detail])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    return context.abort(grpc.StatusCode.INVALID_ARGUMENT, "x is wrong")


@pytest.mark.parametrize("transport", ["auto", "unary", "stream"])
def test_a_refusal_names_the_fields_on_every_transport(client_class: ClientClass, transport: Transport) -> None:
    with peer(refuse) as target, pytest.raises(bngrad.InvalidArgumentError, match=r"^x is wrong$") as refused:
        use(client_class(target, transport=transport), lambda client: client.fused_batch_norm_grad_v2(*inputs(1)))
    assert refused.value.violations == (bngrad.FieldViolation("x", "x is wrong"),)


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xff\xff", grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.PERMISSION_DENIED],
)
def test_a_peer_that_does_not_know_server_info_still_gets_calls(
    client_class: ClientClass, answer: bytes | grpc.StatusCode
) -> None:
    def odd(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method != "ServerInfo":
            return echo(method, request, context)
        if isinstance(answer, bytes):
            return answer
        return context.abort(answer, "odd")

    arrays = inputs(4)
    with peer(odd) as target:
        results = use(client_class(target), lambda client: client.fused_batch_norm_grad_v2(*arrays))
    assert all(map(np.array_equal, results, arrays[1:]))


@pytest.mark.parametrize("transport", ["", "tcp", None, ["auto"]])
def test_an_unknown_transport_is_refused(client_class: ClientClass, transport: Any) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="transport must be 'auto', 'unary', 'stream' or 'shared', "):
        client_class("localhost:1", transport=transport)


def test_a_peer_on_another_host_shares_no_memory(client_class: ClientClass) -> None:
    with peer(echo) as target, pytest.raises(bngrad.UnavailableError, match=f"{target} shares no memory with this"):
        use(client_class(target, transport="shared"), lambda client: client.fused_batch_norm_grad_v2(*inputs(1)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(5, "f2"), (np.int64(5), "bfloat16"), ([5], np.float32), ((), np.int64), ((0, 3), "f4"), ((2, np.int32(3)), "f4")],
)
def test_empty_makes_an_array_where_nothing_is_shared(client_class: ClientClass, shape: Any, dtype: Any) -> None:
    with peer(info) as target:
        array = use(client_class(target), lambda client: client.empty(shape, dtype))
    expected = np.empty(shape, dtype)
    assert (array.shape, array.dtype, array.flags.writeable) == (expected.shape, expected.dtype, True)
    array[...] = 3  # after the client was closed


def test_a_call_waits_no_longer_than_its_timeout_for_the_discovery_by_another() -> None:
    held = Held()
    with peer(held) as target, held, bngrad.Client(target) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.fused_batch_norm_grad_v2, *inputs(1), timeout=SECONDS)
        assert held.arrived.wait(SECONDS)
        with pytest.raises(bngrad.DeadlineExceededError, match=f"{target} did not answer within the timeout of 0.2 s"):
            client.fused_batch_norm_grad_v2(*inputs(2), timeout=0.2)
        client.close()
        with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
            first.result(SECONDS)


def test_a_proxy_in_the_environment_is_not_used(client_class: ClientClass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with peer(info) as target:
        assert ask(client_class, target).version == "1.2.3"


def test_the_callers_channel_options_override_the_defaults(client_class: ClientClass) -> None:
    options = [("grpc.max_receive_message_length", 1)]
    with peer(info) as target, pytest.raises(bngrad.ResourceExhaustedError, match="answered RESOURCE_EXHAUSTED"):
        ask(client_class, target, options=options)


def test_a_port_without_a_server_is_unavailable(client_class: ClientClass) -> None:
    with socket.socket() as bound:  # reserves the port without listening
        bound.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(bngrad.UnavailableError) as refused:
            ask(client_class, target)
    assert str(refused.value).startswith(f"{target} is not available: ")
    assert str(refused.value).endswith("Is `bngrad serve` running there?")


def test_a_server_without_tls_is_named_as_such_to_a_client_with_it(client_class: ClientClass) -> None:
    message = "This client uses TLS, and what listens there does not"
    with peer(info) as target, pytest.raises(bngrad.UnavailableError, match=message):
        use(client_class(target, tls=True), lambda client: client.server_info(timeout=60))


def test_a_unix_socket_without_a_server_is_unavailable(client_class: ClientClass, tmp_path: Path) -> None:
    with pytest.raises(bngrad.UnavailableError, match="No such file or directory"):
        ask(client_class, f"unix:{tmp_path}/socket")


def test_a_lost_connection_is_opened_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with bngrad.Client(address) as client:
        for _ in range(2):
            with peer(info, address):
                assert client.server_info().version == "1.2.3"


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [({}, 60), ({"client_timeout": 300}, 300), ({"client_timeout": 300, "timeout": 100}, 100)],
    ids=["default", "client", "call"],
)
def test_the_clients_timeout_applies_unless_the_call_has_its_own(
    client_class: ClientClass, settings: dict[str, Any], seconds: float
) -> None:
    assert remaining(client_class, **settings) == pytest.approx(seconds, abs=SECONDS)


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_an_endless_timeout_is_no_deadline(client_class: ClientClass, timeout: float) -> None:
    assert remaining(client_class, timeout=timeout) > 2**62


def test_no_answer_within_the_timeout(client_class: ClientClass) -> None:
    held = Held()
    with peer(held) as target, held:
        for timeout in (0.2, 2.0, 20.0):  # on a busy machine the call may not arrive in time
            message = f"{target} did not answer within the timeout of {timeout} s"
            with pytest.raises(bngrad.DeadlineExceededError, match=message):
                ask(client_class, target, timeout=timeout)
            if held.arrived.is_set():
                break
        assert held.ended.wait(SECONDS)


@pytest.mark.parametrize(
    ("timeout", "complaint"),
    [
        *((timeout, "timeout must be positive, not ") for timeout in (0, -1, math.nan, -math.inf)),
        *((timeout, "timeout must be a number of seconds that a float can be, ") for timeout in (10**400, -(10**5000))),
    ],
    ids=lambda value: f"{value:.3}" if isinstance(value, float | str) else "",
)
def test_a_timeout_must_be_positive(client_class: ClientClass, timeout: float, complaint: str) -> None:
    settings: list[dict[str, Any]] = [{"timeout": timeout}, {"client_timeout": timeout}]
    for setting in settings:
        with pytest.raises(bngrad.InvalidArgumentError, match=complaint) as refused:
            ask(client_class, "localhost:1", **setting)
        assert refused.value.violations[0].field == "timeout"


@pytest.mark.parametrize("timeout", [True, "1", 1j])
def test_a_timeout_must_be_a_number(client_class: ClientClass, timeout: Any) -> None:
    for settings in ({"timeout": timeout}, {"client_timeout": timeout}):
        with pytest.raises(TypeError, match="timeout must be a number of seconds, not "):
            ask(client_class, "localhost:1", **settings)


@pytest.mark.parametrize("target", ["", "http://localhost:50051", "https://localhost:50051", "grpc://localhost:50051"])
def test_a_target_must_not_be_a_url(client_class: ClientClass, target: str) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match='must be "HOST:PORT" or "unix:PATH", not ') as refused:
        client_class(target)
    assert refused.value.violations[0].field == "target"


@pytest.mark.parametrize("target", [None, 50051, b"localhost:50051"])
def test_a_target_must_be_a_str(client_class: ClientClass, target: Any) -> None:
    with pytest.raises(TypeError, match=f"target must be a str, a sequence .*, not {target!r}"):
        client_class(target)


def test_a_closed_client_makes_no_calls(client_class: ClientClass) -> None:
    name = "bngrad.Client" if client_class is bngrad.Client else "bngrad.aio.Client"
    with peer(info) as target:
        made = client_class(target)
        use(made, lambda client: client.server_info(), lambda client: client.close())
        with pytest.raises(bngrad.ClientClosedError, match=f"{name}\\('{target}'\\) is closed"):
            use(made, lambda client: client.server_info())


def test_a_closed_client_computes_nothing_in_this_process(client_class: ClientClass) -> None:
    with pytest.raises(bngrad.ClientClosedError, match="is closed"):
        use(
            client_class("local:"),
            lambda client: client.close(),
            lambda client: client.fused_batch_norm_grad_v2(*inputs(1)),
        )


async def test_a_client_that_was_never_used_may_be_closed() -> None:
    bngrad.Client("localhost:1").close()
    await bngrad.aio.Client("localhost:1").close()


def test_a_coroutine_that_no_loop_of_asyncio_runs_begins_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    client = bngrad.aio.Client("localhost:1")
    monkeypatch.setattr(client, "_executor", None)
    call = client.server_info()
    with pytest.raises(RuntimeError, match="no running event loop"):
        call.send(None)


def test_an_array_is_refused_by_a_client_that_is_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    client = bngrad.Client("127.0.0.1:1", transport="stream")
    make = client._calls._own_memory.empty

    def close_and_make(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        client.close()
        return make(shape, dtype)

    monkeypatch.setattr(client._calls._own_memory, "empty", close_and_make)
    with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
        client.empty(3)


async def test_a_call_of_a_client_that_another_thread_closes_as_it_begins_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = bngrad.aio.Client("127.0.0.1:1")
    submit = client._executor.submit

    def close_and_submit(function: Callable[..., Any], *arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(asyncio.run, client.close()).result()
        return submit(function, *arguments)

    monkeypatch.setattr(client._executor, "submit", close_and_submit)
    with pytest.raises(bngrad.ClientClosedError, match="is closed"):
        await client.server_info()


def test_closing_ends_the_calls_in_flight() -> None:
    held = Held()
    with peer(held) as target, held, ThreadPoolExecutor(1) as threads:
        client = bngrad.Client(target)
        call = threads.submit(client.server_info)
        assert held.arrived.wait(SECONDS)
        client.close()
        with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
            call.result(SECONDS)
        assert held.ended.wait(SECONDS)


async def test_closing_ends_the_asynchronous_calls_in_flight() -> None:
    held = Held()
    with peer(held) as target, held:
        client = bngrad.aio.Client(target)
        call = asyncio.create_task(client.server_info())
        assert await asyncio.to_thread(held.arrived.wait, SECONDS)
        await client.close()
        with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
            await call
        assert await asyncio.to_thread(held.ended.wait, SECONDS)


async def test_cancelling_a_task_cancels_its_call() -> None:
    held = Held()
    with peer(held) as target, held:
        async with bngrad.aio.Client(target) as client:
            call = asyncio.create_task(client.server_info())
            assert await asyncio.to_thread(held.arrived.wait, SECONDS)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(held.ended.wait, SECONDS)


async def test_a_call_with_out_that_is_cancelled_again_still_waits_for_its_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, released = threading.Event(), threading.Event()

    def token() -> str:
        begun.set()
        released.wait(SECONDS)
        raise RuntimeError("for a test")

    with peer(echo) as target:
        async with bngrad.aio.Client(target, transport="unary", token=token) as client:
            arrays = inputs(1)
            call = asyncio.create_task(client.fused_batch_norm_grad_v2(*arrays, out=np.empty_like(arrays[0])))
            assert await asyncio.to_thread(begun.wait, SECONDS)
            for _ in range(3):
                call.cancel()
                await asyncio.sleep(0.01)
            assert not call.done()
            released.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            del call
            gc.collect()
    assert not caplog.records


def test_after_an_interrupt_other_threads_learn_the_endpoints() -> None:
    with peer(echo) as target, bngrad.Client(target) as client, ThreadPoolExecutor(1) as threads:
        with interrupt_after("acquire"):
            client.fused_batch_norm_grad_v2(*inputs(1))
        threads.submit(client.fused_batch_norm_grad_v2, *inputs(1), timeout=2).result(SECONDS)


async def test_a_cancelled_task_does_not_wait_for_the_endpoints_that_another_one_asks_for() -> None:
    held = Held()
    with peer(held) as target, held:
        async with bngrad.aio.Client(target) as client:
            arrays = inputs(1)
            asking = asyncio.create_task(client.fused_batch_norm_grad_v2(*arrays))
            assert await asyncio.to_thread(held.arrived.wait, SECONDS)
            waiting = asyncio.create_task(client.fused_batch_norm_grad_v2(*arrays, out=np.empty_like(arrays[0])))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not asking.done()
            asking.cancel()


def test_a_handle_gives_numpy_the_tensor_and_a_copy_only_where_one_is_allowed() -> None:
    with bngrad.Client("127.0.0.1:1", transport="unary") as client:
        x = np.ones((2, 3), np.float32)
        handle = client.send_ahead(x)
        for array in (np.asarray(handle), handle.__array__(copy=False), handle.__array__(np.float32, copy=False)):
            assert np.shares_memory(array, x)
        for array in (handle.__array__(copy=True), handle.__array__(np.float64)):
            assert not np.shares_memory(array, x)
            assert (array == x).all()
        with pytest.raises(ValueError, match="copy must not be False for dtype float64, since the tensor is float32"):
            handle.__array__(np.float64, copy=False)


def test_a_call_sends_its_tensors_itself_where_no_thread_can_send_them_ahead() -> None:
    with peer(echo) as target, bngrad.Client(target) as client:
        x, *tensors = inputs(3)
        with no_thread("bngrad-ahead"):
            ahead = client.send_ahead(x)
        for handle in (ahead, client.send_ahead(x)):
            assert all(map(np.array_equal, client.fused_batch_norm_grad_v2(handle, *tensors), tensors))


def test_a_handle_keeps_the_shape_that_its_tensor_had() -> None:
    with bngrad.Client("127.0.0.1:1") as client:
        x = np.ones((2, 3), np.float32)
        handle = client.send_ahead(x)
        x.resize(6, refcheck=False)
        assert np.asarray(handle).shape == handle.shape == (2, 3)


def senders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "bngrad-ahead"}


@pytest.mark.parametrize(("target", "transport"), [("127.0.0.1:1", "unary"), ("local:", "auto")])
def test_a_client_that_sends_nothing_ahead_starts_no_thread_for_it(target: str, transport: Transport) -> None:
    before = senders()
    with bngrad.Client(target, transport=transport) as client:
        client.send_ahead(np.ones(3, np.float32))
        assert not senders() - before


def test_closing_ends_the_thread_that_sends_ahead() -> None:
    before = senders()
    client = bngrad.Client("127.0.0.1:1")
    client.send_ahead(np.ones(3, np.float32))
    (sender,) = senders() - before
    client.close()
    sender.join(SECONDS)
    assert not sender.is_alive()


def test_an_interrupt_while_the_thread_that_sends_ahead_starts_leads_to_no_other_one() -> None:
    before = senders()
    with bngrad.Client("127.0.0.1:1") as client:
        with interrupt_after(START_THREAD, module="threading"):
            client.send_ahead(np.ones(3, np.float32))
        (sender,) = senders() - before
        wait_until(sender.is_alive)
        client.send_ahead(np.ones(3, np.float32))
        assert senders() - before == {sender}


def test_threads_that_share_a_client_get_their_own_answers() -> None:
    with peer(echo) as target, bngrad.Client(target) as client, ThreadPoolExecutor(16) as threads:

        def right(number: int) -> bool:
            arrays = inputs(number)
            results = client.fused_batch_norm_grad_v2(*arrays)
            return all(map(np.array_equal, results, arrays[1:]))

        assert all(threads.map(right, range(200)))


async def test_tasks_that_share_a_client_get_their_own_answers() -> None:
    with peer(echo) as target:
        async with bngrad.aio.Client(target) as client:
            calls = [client.fused_batch_norm_grad_v2(*inputs(number)) for number in range(200)]
            for number, results in enumerate(await asyncio.gather(*calls)):
                assert all(map(np.array_equal, results, inputs(number)[1:]))


def test_a_client_inherited_by_a_fork_refuses_calls_and_harms_nothing(client_class: ClientClass) -> None:
    program = """
        import asyncio, os, signal, sys
        import bngrad
        made = getattr(bngrad, sys.argv[1]).Client(sys.argv[2]) if sys.argv[1] == "aio" else bngrad.Client(sys.argv[2])
        def done(result):
            return asyncio.run(result) if asyncio.iscoroutine(result) else result
        async def ask():
            return await made.server_info()
        def info():
            return asyncio.run(ask()) if sys.argv[1] == "aio" else made.server_info()
        info()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                info()
            except bngrad.ClientClosedError as error:
                done(made.close())
                os._exit(3 if "which was forked: make one in the child" in str(error) else 1)
            os._exit(2)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        info()
        done(made.close())
        sys.exit(status)
    """
    kind = "Client" if client_class is bngrad.Client else "aio"
    with peer(info) as target:
        arguments = [sys.executable, "-c", textwrap.dedent(program), kind, target]
        assert subprocess.run(arguments, timeout=60, check=False).returncode == 3


async def test_a_call_that_waits_for_a_thread_keeps_its_timeout() -> None:
    held = Held()
    with peer(held) as target, held:
        async with bngrad.aio.Client(target) as client:
            long = [asyncio.create_task(client.server_info(timeout=SECONDS)) for _ in range(64)]
            assert await asyncio.to_thread(held.arrived.wait, SECONDS)
            late = asyncio.create_task(client.server_info(timeout=0.1))
            await asyncio.sleep(0.2)
            for call in long:
                call.cancel()
            with pytest.raises(bngrad.DeadlineExceededError, match=r"too many calls for the timeout of 0\.1 s"):
                await late


async def test_a_token_function_is_called_in_the_context_of_the_task() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    seen: list[Any] = []

    def note(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.extend(value for key, value in context.invocation_metadata() if key == "authorization")
        return info(method, request, context)

    with peer(note) as target:
        async with bngrad.aio.Client(target, token=name.get) as client:
            name.set("alice")
            await client.server_info()
    assert seen == ["Bearer alice"]


def test_a_message_that_the_server_does_not_read_keeps_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"

        def greet_and_fall_silent() -> socket.socket:
            sock, _ = silent.accept()
            windows = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW})
            sock.sendall(windows + frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW))
            return sock

        with ThreadPoolExecutor(2) as threads, bngrad.Client(target, transport="unary") as client:
            peer_socket = threads.submit(greet_and_fall_silent)
            arrays = inputs(1, (256, 64, 64, 4))
            call = threads.submit(client.fused_batch_norm_grad_v2, *arrays, timeout=2)
            with peer_socket.result(SECONDS), pytest.raises(bngrad.DeadlineExceededError):
                call.result(SECONDS)


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"shape": (2, -1)}, bngrad.InvalidArgumentError, "shape must have no negative lengths"),
        ({"shape": (0, 10**5000)}, bngrad.InvalidArgumentError, "shape must have lengths below 2"),
        ({"shape": 2, "dtype": "\ud800"}, TypeError, "dtype must be one of NumPy's, not "),
        ({"shape": 1.5}, TypeError, "shape must be an int or a sequence of int, not 1.5"),
        ({"shape": 2, "dtype": "nonsense"}, TypeError, "dtype must be one of NumPy's, not 'nonsense'"),
        ({"shape": 2, "dtype": object}, bngrad.InvalidArgumentError, "dtype must be one without Python objects"),
        ({"shape": 2**60}, MemoryError, "no [0-9]+ bytes for an array"),
    ],
)
def test_impossible_shapes_and_dtypes_are_refused(
    client_class: ClientClass, arguments: Any, error: type[Exception], complaint: str
) -> None:
    with peer(info) as target, pytest.raises(error, match=complaint):
        use(client_class(target), lambda client: client.empty(**arguments))


async def test_closing_an_asynchronous_client_ends_its_threads() -> None:
    before = set(threading.enumerate())
    client = bngrad.aio.Client("127.0.0.1:1", retries=False)
    with pytest.raises(bngrad.UnavailableError):
        await client.server_info()
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name == "bngrad"]
    assert threads
    await client.close()
    wait_until(lambda: not any(thread.is_alive() for thread in threads))
