"""Exchanges by the stock generated client on every port, and bytes that are no exchange."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.problems import Case, Inputs, assert_same_bits, random_inputs
from tests.integration.status_details import violations
from tests.servers import DEVICE, SMALL_ARENA, TIMEOUT_S, endpoints_of, targets_of

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_server.config import ServerConfig
from bngrad_wire import http2

CASES = [Case("v3", "NHWC", (4, 17, 17, 7)), Case("v2", "NCHW", (40, 7, 33, 33)), Case("onednn", "NXC", (30, 5))]
STANDING = 130
CASE = CASES[0]
INPUTS = random_inputs(CASE.spec())
Y, X = INPUTS.y_backprop.tobytes(), INPUTS.x.tobytes()
FLOAT = pb.DATA_TYPE_FLOAT32
LOCATION = pb.Location(region_key=bytes(16))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"

# What the ops call y_backprop, x, scale, reserve_space_1 and reserve_space_2.
NAMES = {
    "v3": ("fused_batch_norm_grad_v3", INPUTS._fields),
    "v2": ("fused_batch_norm_grad_v2", INPUTS._fields),
    "onednn": ("batch_norm_training_backprop", ("output_delta", "input_forward", "gamma", "mean", "variance")),
}


def header(case: Case = CASE, inputs: Inputs = INPUTS, **changes: Any) -> pb.ExchangeRequest:
    part, fields = NAMES[case.op]
    tensors = {
        field: pb.Tensor(dtype=FLOAT, shape=array.shape, data=array.tobytes() if array.ndim == 1 else b"")
        for field, array in zip(fields, inputs, strict=True)
    }
    message = pb.ExchangeRequest()
    getattr(message, part).MergeFrom(
        type(getattr(message, part))(**{**tensors, "epsilon": 1e-4, "data_format": case.data_format, **changes})
    )
    return message


def chunks(data: bytes, *sizes: int) -> Iterator[pb.ExchangeRequest]:
    """Splits data into chunks of these sizes, with the rest in one more."""
    for size in (*sizes, len(data)):
        if data:
            yield pb.ExchangeRequest(chunk=data[:size])
            data = data[size:]


def request(case: Case, *sizes: int) -> list[pb.ExchangeRequest]:
    inputs = random_inputs(case.spec())
    large = [inputs.x, inputs.y_backprop] if case.op == "onednn" else [inputs.y_backprop, inputs.x]
    return [header(case, inputs), *(chunk for array in large for chunk in chunks(array.tobytes(), *sizes))]


def answer_of(case: Case, responses: Iterator[pb.ExchangeResponse]) -> tuple[Any, ...]:
    """The next answer on a stream."""
    first = next(responses)
    assert first.WhichOneof("part") == NAMES[case.op][0]
    tensors = [value for _, value in getattr(first, NAMES[case.op][0]).ListFields()]
    assert tuple(tensors[0].shape) == case.shape
    assert not tensors[0].data
    data = b""
    while len(data) < int(np.prod(case.shape)) * 4:
        data += next(responses).chunk
    x_backprop = np.frombuffer(data, np.float32).reshape(case.shape)
    return x_backprop, *(np.frombuffer(tensor.data, np.float32) for tensor in tensors[1:3])


@pytest.fixture(scope="module", params=["tcp", "local"])
def stub(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[Any]:
    with grpc.insecure_channel(targets_of(server.target)[request.param]) as channel:
        yield pb_grpc.BatchNormGradServiceStub(channel)


@pytest.fixture(scope="module")
def other(server: EmbeddedServer) -> Iterator[Callable[[], None]]:
    """Checks that other clients are still served."""
    with bngrad.Client(server.target) as client, bngrad.Client(server.target, transport="stream") as streaming:
        expected = CASE.run(client, INPUTS)

        def check() -> None:
            for each in (client, streaming):
                assert_same_bits(CASE.run(each, INPUTS), expected)

        yield check


@pytest.mark.parametrize("sizes", [(), (1,), (0, 1, 0, 7, 64), (4096, 1)], ids=str)
def test_requests_follow_each_other_on_a_stream_in_chunks_of_any_size(
    stub: Any, server: EmbeddedServer, sizes: tuple[int, ...]
) -> None:
    responses = stub.Exchange(message for case in [*CASES, *CASES] for message in request(case, *sizes))
    with bngrad.Client(server.target, transport="unary") as client:
        for case in [*CASES, *CASES]:
            assert_same_bits(answer_of(case, responses), case.run(client, random_inputs(case.spec())))
    assert next(responses, None) is None


def test_many_small_requests_in_small_chunks_on_a_stream_are_all_answered(stub: Any) -> None:
    """None of their messages is long enough to count for more than a frame."""
    case = Case("v3", "NHWC", (2, 1, 1, 4))
    messages = request(case, *[4] * 8) * 500
    responses = stub.Exchange(iter(messages), timeout=TIMEOUT_S)
    first, *others = [answer_of(case, responses) for _ in range(500)]
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("requests", [0, 1])
@pytest.mark.parametrize("door", ["tcp", "local"])
def test_an_exchange_kept_open_does_not_delay_the_end_of_a_server(door: str, requests: int) -> None:
    messages: SimpleQueue[pb.ExchangeRequest] = SimpleQueue()
    with EmbeddedServer() as server, grpc.insecure_channel(targets_of(server.target)[door]) as channel:
        responses = pb_grpc.BatchNormGradServiceStub(channel).Exchange(iter(messages.get, None))
        for message in request(CASE) * requests:
            messages.put(message)
        for _ in range(requests):
            answer_of(CASE, responses)
        time.sleep(0.5)  # it waits for a request
        began = time.monotonic()
        server.process.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            next(responses)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(TIMEOUT_S) == 0
        assert time.monotonic() - began < ServerConfig().drain_timeout_s / 2
        messages.put(pb.ExchangeRequest())  # ends the thread that sends


def test_an_exchange_of_empty_tensors_needs_no_chunk(stub: Any) -> None:
    case = Case("v2", "NHWC", (0, 4, 4, 3))
    inputs = random_inputs(case.spec())
    responses = stub.Exchange(iter([header(case, inputs)] * 2))
    for _ in range(2):
        assert not answer_of(case, responses)[1].any()


def test_an_exchange_that_ends_before_it_began_is_no_error(stub: Any) -> None:
    assert list(stub.Exchange(iter([]))) == []


@pytest.mark.parametrize("size", [1, 7, 30])
def test_fields_of_a_later_version_and_split_fields_are_read_as_protobuf_does(stub: Any, size: int) -> None:
    """Protobuf merges a message that comes twice in a oneof; the last bytes belong to an unknown field."""
    whole = header().fused_batch_norm_grad_v3
    first, second = pb.ExchangeRequest(), pb.ExchangeRequest()
    first.fused_batch_norm_grad_v3.y_backprop.CopyFrom(whole.y_backprop)
    second.fused_batch_norm_grad_v3.CopyFrom(whole)
    second.fused_batch_norm_grad_v3.ClearField("y_backprop")
    unknown = b"\xfa\x01" + bytes([size]) + bytes(size)
    split = pb.ExchangeRequest.FromString(first.SerializeToString() + second.SerializeToString() + unknown)
    padded = pb.ExchangeRequest.FromString(pb.ExchangeRequest(chunk=Y).SerializeToString() + unknown)
    answers = [
        answer_of(CASE, stub.Exchange(iter(messages)))
        for messages in ([header(), *chunks(Y), *chunks(X)], [split, padded, *chunks(X)])
    ]
    assert_same_bits(*answers)


@pytest.mark.parametrize(
    ("messages", "field", "description"),
    [
        ([pb.ExchangeRequest()], "part", "a request must come first, not nothing"),
        ([*chunks(Y)], "part", "a request must come first, not chunk"),
        ([header(), header()], "part", "a chunk must follow, not fused_batch_norm_grad_v3"),
        ([header(), *chunks(Y), pb.ExchangeRequest()], "part", "a chunk must follow, not nothing"),
        ([header()], "part", f"{len(Y)} bytes of chunks are missing"),
        ([header(), *chunks(Y), *chunks(X[:-1])], "part", "1 bytes of chunks are missing"),
        ([header(), *chunks(Y + X)], "part", f"a chunk has {len(X)} bytes more than its tensor"),
        ([header(), *chunks(Y + X, 1)], "part", f"a chunk has {len(X)} bytes more than its tensor"),
        ([header(), *chunks(Y), *chunks(X + b"\0")], "part", "a chunk has 1 bytes more than its tensor"),
        (
            [header(), *chunks(Y), *chunks(X), pb.ExchangeRequest(chunk=b"")],
            "part",
            "a request must come first, not chunk",
        ),
        (
            [header(x=pb.Tensor(dtype=FLOAT, shape=CASE.shape, data=X))],
            "x",
            f"x must come in chunks, not with {len(X)} bytes of data",
        ),
        ([header(x=pb.Tensor(dtype=FLOAT, shape=CASE.shape, location=LOCATION))], "x", "x must not have a location"),
        (
            [header(x_backprop_location=LOCATION)],
            "x_backprop_location",
            "x_backprop_location must not be given where the elements come in chunks",
        ),
        ([header(data_format="NDHWC")], "x", f"x must be 5-dimensional for data_format NDHWC, not {CASE.shape}"),
    ],
)
def test_what_is_out_of_order_or_of_the_wrong_size_is_refused_with_a_violation(
    stub: Any, other: Callable[[], None], messages: list[pb.ExchangeRequest], field: str, description: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Exchange(iter(messages)))
    assert violations(refused.value) == {field: description}
    other()


@pytest.mark.parametrize("target", ["tcp", "local"])
@pytest.mark.parametrize("messages", [[b"\xff" * 100], [header().SerializeToString(), b"\x22\xff\xff\xff\xff\x0f"]])
def test_invalid_messages_are_refused(
    server: EmbeddedServer, other: Callable[[], None], target: str, messages: list[bytes]
) -> None:
    with grpc.insecure_channel(targets_of(server.target)[target]) as channel:
        exchange: Any = channel.stream_stream("/bngrad.v1.BatchNormGradService/Exchange")
        with pytest.raises(grpc.RpcError) as refused:
            list(exchange(iter(messages)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    other()


@pytest.mark.parametrize("where", ["tcp", "calls", "regions"])
@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100_000,
        bytes(8),
        b"\xff" * 8,
        struct.pack("<Q", 4096) * 2,
        b"\1\2\3",
        PREFACE[:10],
        PREFACE + bytes(100_000),
        PREFACE + SETTINGS + b"\xff" * 100_000,
        PREFACE + SETTINGS + b"\0\0\5\1\4\0\0\0\1" + b"\xff" * 5,
        PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(1000),
    ],
    ids=range(12),
)
def test_garbage_on_a_socket_does_not_harm_other_clients(
    server: EmbeddedServer, other: Callable[[], None], where: str, garbage: bytes
) -> None:
    host, _, port = server.target.rpartition(":")
    address: Any = (host, int(port)) if where == "tcp" else f"{endpoints_of(server.target).local_directory}/{where}"
    with socket.socket(socket.AF_INET if where == "tcp" else socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(address)
        with suppress(ConnectionError):
            sock.sendall(garbage)
        other()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):  # but not TimeoutError
            while sock.recv(65536):
                pass
    other()
    assert "Traceback" not in server.stderr()


def test_a_call_that_its_client_resets_leaves_the_connection_to_others(server: EmbeddedServer) -> None:
    path = "/bngrad.v1.BatchNormGradService/Exchange"
    host, _, port = server.target.rpartition(":")
    address = host, int(port)
    with closing(http2.ClientConnection(socket.create_connection(address, TIMEOUT_S), "localhost")) as connection:
        for sent in (header(), *chunks(Y, 1000)):
            call = connection.call(path)
            call.send_message(sent.SerializeToString())
            call.cancel()
        call = connection.call(path)
        for message in request(CASE):
            call.send_message(message.SerializeToString(), more=True)
        call.half_close()
        assert call.receive_message()
    assert "Traceback" not in server.stderr()


@pytest.mark.parametrize("door", ["tcp", "local"])
def test_stalled_exchanges_do_not_block_others_for_ever(door: str) -> None:
    """Each occupies one of the threads that receive, of which a client gets 128."""
    still = threading.Event()

    def nothing() -> Iterator[pb.ExchangeRequest]:
        still.wait()
        yield from ()

    options = ("--transfer-timeout", "5", *SMALL_ARENA)
    with EmbeddedServer(device=DEVICE, options=options) as server, ExitStack() as stack:
        stack.callback(still.set)
        target = targets_of(server.target)[door]
        own = [("grpc.use_local_subchannel_pool", 1)]  # gives each channel its own connection
        channels = [stack.enter_context(grpc.insecure_channel(target, own)) for _ in range(STANDING + 1)]
        *stubs, stub = map(pb_grpc.BatchNormGradServiceStub, channels)
        begun = stubs[0].Exchange(message for source in (request(CASE), nothing()) for message in source)
        answer_of(CASE, begun)
        standing = [begun, *(stub.Exchange(nothing()) for stub in stubs[1:])]
        assert len(list(stub.Exchange(iter(request(CASE)), timeout=TIMEOUT_S))) > 1
        for call in standing:
            assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
