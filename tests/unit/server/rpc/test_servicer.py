"""The calls of the service on both ports, with a thread in place of a worker process."""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tests.unit.server.rpc.peers import ARENA_NBYTES, Peer
from tests.unit.server.workers.additions import NBYTES, TIMEOUT_S, check_answer, inputs, request_of, tensor, wait_until

from bngrad_kernels.problem import GradGradProblem
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.codec.request_reader import RequestReader
from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.errors import OverloadedError
from bngrad_server.memory.received_message import ReceivedMessage
from bngrad_server.rpc.servicer import UNARY_OPS
from bngrad_server.rpc_context import RpcContext
from bngrad_server.staged_request import StagedRequest
from bngrad_wire.fields import FieldReader

V3Response = pb.FusedBatchNormGradV3Response


def chunk(data: bytes) -> bytes:
    return pb.ExchangeRequest(chunk=data).SerializeToString()


def violations(error: grpc.RpcError) -> list[str]:
    """The fields that the server complains about."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    return [violation.field for violation in bad_request.field_violations]


def test_a_whole_request_is_answered(peer: Peer) -> None:
    for seed in range(3):
        arrays = inputs(seed)
        answer = V3Response.FromString(peer.unary("FusedBatchNormGradV3", request_of(arrays).SerializeToString()))
        check_answer(answer, answer.x_backprop.data, arrays)


def test_a_request_for_which_there_is_no_memory_is_not_counted_as_admitted(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    arrays = inputs()
    request = request_of(arrays).SerializeToString()
    with monkeypatch.context() as patch:
        patch.setattr("bngrad_server.engine.StagedRequest", fail)
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                peer.unary("FusedBatchNormGradV3", request)
    assert peer.engine.admission.admitted == 0
    answer = V3Response.FromString(peer.unary("FusedBatchNormGradV3", request))
    check_answer(answer, answer.x_backprop.data, arrays)


def test_an_exchange_releases_a_message_for_whose_tensors_there_is_no_memory(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pb.ExchangeRequest(fused_batch_norm_grad_v3=request_of(inputs(), chunked=True)).SerializeToString()
    released, release = list[ReceivedMessage](), ReceivedMessage.release

    def note(message: ReceivedMessage) -> None:
        released.append(message)
        release(message)

    monkeypatch.setattr(ReceivedMessage, "release", note)
    monkeypatch.setattr(StagedRequest, "copy_from", mock.Mock(side_effect=MemoryError))
    monkeypatch.setattr(peer.engine, "computes_at_once", lambda *_, **__: False)
    with pytest.raises(grpc.RpcError):
        peer.exchange(request)
    assert released
    assert peer.engine.admission.admitted == 0


@pytest.mark.parametrize("chunk_nbytes", [1000, 333, NBYTES, NBYTES - 1])
def test_an_exchange_answers_request_after_request(peer: Peer, chunk_nbytes: int) -> None:
    messages, all_arrays = [], [inputs(seed) for seed in range(3)]
    for arrays in all_arrays:
        request = request_of(arrays, chunked=True)
        messages.append(pb.ExchangeRequest(fused_batch_norm_grad_v3=request).SerializeToString())
        for name in ("y_backprop", "x"):
            data = arrays[name].tobytes()
            messages += [chunk(data[i : i + chunk_nbytes]) for i in range(0, NBYTES, chunk_nbytes)]
    answers = peer.exchange(*messages)
    for arrays in all_arrays:
        first = answers.pop(0)
        assert first.WhichOneof("part") == "fused_batch_norm_grad_v3"
        chunks = b""
        while answers and answers[0].WhichOneof("part") == "chunk":
            chunks += answers.pop(0).chunk
        check_answer(first.fused_batch_norm_grad_v3, chunks, arrays)
    assert answers == []


def test_onednns_tensors_come_in_the_order_of_their_field_numbers(peer: Peer) -> None:
    arrays = inputs()
    names = {"output_delta": "y_backprop", "input_forward": "x", "mean": "reserve_space_1"}
    names |= {"variance": "reserve_space_2", "gamma": "scale"}
    tensors: dict[str, Any] = {name: tensor(arrays[other]) for name, other in names.items()}
    request = pb.BatchNormTrainingBackpropRequest(epsilon=1, **tensors)
    request.output_delta.data = request.input_forward.data = b""
    first = pb.ExchangeRequest(batch_norm_training_backprop=request).SerializeToString()
    answer, *chunks = peer.exchange(first, chunk(arrays["x"].tobytes()), chunk(arrays["y_backprop"].tobytes()))
    response = answer.batch_norm_training_backprop
    assert b"".join(each.chunk for each in chunks) == (arrays["x"] + arrays["y_backprop"]).tobytes()
    assert response.gamma_delta.data == (arrays["reserve_space_1"] + arrays["scale"]).tobytes()


def test_the_second_order_has_three_large_inputs_and_two_large_outputs(peer: Peer) -> None:
    names = GradGradProblem.large_inputs
    arrays = {name: array for seed, name in enumerate(names) for array in [inputs(seed)["x"]]}
    arrays |= {name: inputs(seed)["scale"] for seed, name in enumerate(GradGradProblem.small_inputs)}
    tensors: dict[str, Any] = {name: tensor(array) for name, array in arrays.items()}
    request = pb.FusedBatchNormGradGradRequest(**tensors)
    u, dy, x = (arrays[name] for name in names)
    expected = [u + dy, u - x, sum(arrays[name] for name in GradGradProblem.small_inputs)]

    whole = peer.unary("FusedBatchNormGradGrad", request.SerializeToString())
    response = pb.FusedBatchNormGradGradResponse.FromString(whole)
    answered = [response.grad_y_backprop, response.grad_x, response.grad_scale]
    assert [each.data for each in answered] == [array.tobytes() for array in expected]

    for name in names:
        getattr(request, name).ClearField("data")
    first = pb.ExchangeRequest(fused_batch_norm_grad_grad=request).SerializeToString()
    answer, *chunks = peer.exchange(first, *(chunk(arrays[name].tobytes()) for name in names))
    response = answer.fused_batch_norm_grad_grad
    assert [each.data for each in (response.grad_y_backprop, response.grad_x)] == [b"", b""]
    assert [each.chunk for each in chunks] == [array.tobytes() for array in expected[:2]]
    assert response.grad_scale.data == expected[2].tobytes()


def test_no_two_outputs_of_the_second_order_may_overlap(peer: Peer) -> None:
    region = peer.engine.regions.lease(8192)
    tensors: dict[str, Any] = {name: tensor(inputs()["x"]) for name in GradGradProblem.large_inputs}
    tensors |= {name: tensor(inputs()["scale"]) for name in GradGradProblem.small_inputs}
    request = pb.FusedBatchNormGradGradRequest(
        **tensors,
        grad_y_backprop_location=pb.Location(region_key=region.key),
        grad_x_location=pb.Location(region_key=region.key, offset=64),
    )
    with pytest.raises(grpc.RpcError, match="grad_x_location must not overlap grad_y_backprop_location") as caught:
        peer.unary("FusedBatchNormGradGrad", request.SerializeToString())
    assert violations(caught.value) == ["grad_x_location"]
    request.grad_x_location.offset = 4096
    answer = peer.unary("FusedBatchNormGradGrad", request.SerializeToString())
    with mmap.mmap(region.fd, region.nbytes) as memory:
        assert memory[:NBYTES] == (2 * inputs()["x"]).tobytes()
        assert memory[4096:][:NBYTES] == bytes(NBYTES)
    assert not pb.FusedBatchNormGradGradResponse.FromString(answer).grad_x.data
    wait_until(lambda: peer.is_at_rest)
    peer.engine.regions.end(region)


UNKNOWN_FIELD = b"\x98\x06\x01"


def test_messages_with_unknown_fields_are_understood(peer: Peer) -> None:
    arrays = inputs()
    first = pb.ExchangeRequest(fused_batch_norm_grad_v3=request_of(arrays, chunked=True)).SerializeToString()
    chunks = [chunk(arrays[name].tobytes()) for name in ("y_backprop", "x")]
    messages = [first + UNKNOWN_FIELD, chunk(b"") + UNKNOWN_FIELD, chunk(b""), UNKNOWN_FIELD + chunks[0], chunks[1]]
    answer, *rest = peer.exchange(*messages)
    check_answer(answer.fused_batch_norm_grad_v3, b"".join(each.chunk for each in rest), arrays)


BEGIN = pb.ExchangeRequest(fused_batch_norm_grad_v3=request_of(inputs(), chunked=True)).SerializeToString()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([chunk(b"x")], "a request must come first, not chunk"),
        ([b""], "a request must come first, not nothing"),
        ([UNKNOWN_FIELD], "a request must come first, not nothing"),
        pytest.param([BEGIN], "840 bytes of chunks are missing", marks=pytest.mark.slow),
        pytest.param([BEGIN, chunk(bytes(NBYTES - 1))], "1 bytes of chunks are missing", marks=pytest.mark.slow),
        pytest.param([BEGIN, chunk(bytes(NBYTES))], "840 bytes of chunks are missing", marks=pytest.mark.slow),
        ([BEGIN, chunk(bytes(NBYTES + 1))], "a chunk has 1 bytes more than its tensor"),
        ([BEGIN, chunk(bytes(NBYTES + 1)) + UNKNOWN_FIELD], "a chunk has 1 bytes more than its tensor"),
        ([BEGIN, chunk(bytes(NBYTES)), chunk(bytes(NBYTES - 1)), chunk(bytes(2))], "a chunk has 1 bytes more"),
        ([BEGIN, BEGIN], "a chunk must follow, not fused_batch_norm_grad_v3"),
        ([BEGIN, chunk(bytes(8)), b""], "a chunk must follow, not nothing"),
    ],
)
def test_messages_out_of_order_or_of_the_wrong_size_end_the_exchange(
    peer: Peer, messages: list[bytes], words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        peer.exchange(*messages)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violations(caught.value) == ["part"]
    wait_until(lambda: peer.is_at_rest)
    test_a_whole_request_is_answered(peer)


@pytest.mark.parametrize("messages", [[b"\x02\x00"], [b"\xff"], [b"\x0a\x02\x0a\xff"], [BEGIN, b"\x22\xff"]])
def test_a_malformed_message_ends_the_exchange(peer: Peer, messages: list[bytes]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        peer.exchange(*messages)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: peer.is_at_rest)


@pytest.mark.parametrize("op", UNARY_OPS.values())
def test_a_request_without_anything_is_refused(peer: Peer, op: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        peer.unary(op, b"")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x" in violations(caught.value) or "input_forward" in violations(caught.value)


def test_a_request_beyond_the_arena_is_refused(peer: Peer) -> None:
    request = request_of(inputs(), chunked=True)
    for large in (request.x, request.y_backprop):
        large.shape[0] = ARENA_NBYTES
    with pytest.raises(grpc.RpcError) as caught:
        peer.exchange(pb.ExchangeRequest(fused_batch_norm_grad_v3=request).SerializeToString())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("n_requests", [1, 2], ids=["the first runs", "the second waits"])
def test_memory_comes_back_after_a_deadline(peer: Peer, n_requests: int) -> None:
    test_a_whole_request_is_answered(peer)  # connects
    peer.worker.may_run.clear()
    request = request_of(inputs()).SerializeToString()
    for timeout in (0.3, TIMEOUT_S / 4):  # on a busy machine they may come too late
        with ThreadPoolExecutor() as threads:
            futures = [threads.submit(peer.unary, "FusedBatchNormGradV3", request, timeout) for _ in range(n_requests)]
            for future in futures:
                with pytest.raises(grpc.RpcError) as caught:
                    future.result(TIMEOUT_S)
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if not peer.is_at_rest:
            break
    assert not peer.is_at_rest  # the worker has not ended yet
    peer.worker.may_run.set()
    wait_until(lambda: peer.is_at_rest)
    test_a_whole_request_is_answered(peer)


def located(key: bytes, *, x: int | None, x_backprop: int | None) -> tuple[pb.FusedBatchNormGradV3Request, Any]:
    arrays = inputs()
    request = request_of(arrays)
    if x is not None:
        request.x.ClearField("data")
        request.x.location.CopyFrom(pb.Location(region_key=key, offset=x))
    if x_backprop is not None:
        request.x_backprop_location.CopyFrom(pb.Location(region_key=key, offset=x_backprop))
    return request, arrays


@pytest.mark.parametrize(("x", "x_backprop"), [(0, None), (None, 0), (0, 896), (896, 0)])
def test_tensors_may_lie_in_a_region(peer: Peer, x: int | None, x_backprop: int | None) -> None:
    region = peer.engine.regions.lease(8192)
    request, arrays = located(region.key, x=x, x_backprop=x_backprop)
    with mmap.mmap(region.fd, region.nbytes) as memory:
        if x is not None:
            memory[x : x + NBYTES] = arrays["x"].tobytes()
        answer = V3Response.FromString(peer.unary("FusedBatchNormGradV3", request.SerializeToString()))
        result = answer.x_backprop.data if x_backprop is None else memory[x_backprop : x_backprop + NBYTES]
        check_answer(answer, result, arrays)
        if x_backprop is not None:
            assert answer.x_backprop.location == request.x_backprop_location
            assert answer.x_backprop.data == b""
    wait_until(lambda: peer.is_at_rest)
    peer.engine.regions.end(region)
    assert peer.engine.regions.nbytes == 0


@pytest.mark.parametrize("x_backprop", [0, 64, 832])
def test_outputs_must_not_overlap_inputs(peer: Peer, x_backprop: int) -> None:
    region = peer.engine.regions.lease(8192)
    request, _ = located(region.key, x=0, x_backprop=x_backprop)
    with pytest.raises(grpc.RpcError, match="x_backprop_location must not overlap x") as caught:
        peer.unary("FusedBatchNormGradV3", request.SerializeToString())
    assert violations(caught.value) == ["x_backprop_location"]
    wait_until(lambda: peer.is_at_rest)
    peer.engine.regions.end(region)


def test_a_region_whose_client_is_gone_stays_until_its_request_has_ended(peer: Peer) -> None:
    regions = peer.engine.regions
    region = regions.lease(8192)
    request, _ = located(region.key, x=0, x_backprop=4096)
    peer.worker.may_run.clear()
    with ThreadPoolExecutor() as threads:
        future = threads.submit(peer.unary, "FusedBatchNormGradV3", request.SerializeToString())
        wait_until(lambda: region.holds == 2)
        regions.end(region)
        assert regions.nbytes == 8192
        peer.worker.may_run.set()
        future.result(TIMEOUT_S)
    wait_until(lambda: region.holds == 0)
    regions.collect()  # as the server of leases does each second
    assert regions.nbytes == 0


@pytest.mark.parametrize(
    ("way", "transport"), [("whole", "unary"), ("located", "shared"), ("chunked", "stream"), ("garbage", "unary")]
)
def test_what_a_full_server_refuses_is_counted_by_the_way_it_came(
    peer: Peer, way: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, (in_region, _) = request_of(inputs()), located(b"", x=0, x_backprop=None)
    messages = {"whole": whole.SerializeToString(), "located": in_region.SerializeToString(), "garbage": b"garbage"}
    if way == "located":  # the way of a request is known where one like it was read
        with pytest.raises(grpc.RpcError, match="has the key of no region"):
            peer.unary("FusedBatchNormGradV3", messages[way])
    parsed: list[object] = []
    monkeypatch.setattr(FieldReader, "__init__", lambda reader, data: parsed.append(data))
    admission = peer.engine.admission
    clients = [f"client {i}" for i in range(ServerConfig().max_requests)]
    for client in clients:
        admission.enter(client, 0, None)
    with pytest.raises(grpc.RpcError, match="the server is full"):
        peer.exchange(BEGIN) if way == "chunked" else peer.unary("FusedBatchNormGradV3", messages[way])
    counted = ("FusedBatchNormGradV3", transport, "RESOURCE_EXHAUSTED", 1)
    assert counted in peer.engine.observer.metrics.status()["requests"]
    assert parsed == []
    for client in clients:
        admission.leave(client, 0, computed=False)


def test_a_request_that_is_computed_at_once_is_held_to_the_limits_of_its_client() -> None:
    engine = Engine(ServerConfig(arena_bytes=ARENA_NBYTES, max_client_requests=1), lambda: None)
    rpc = RpcContext("greedy", None, lambda: False, lambda: None, {})
    message = request_of(inputs()).SerializeToString()
    request = RequestReader(OPS[0], chunked=False).read(message)
    engine.small_requests.compute = computed = mock.Mock(return_value=[])  # type: ignore[method-assign]
    engine.admission.enter("greedy", 0, None)
    with pytest.raises(OverloadedError, match="has 1 requests in progress already"):
        engine.compute_at_once(request, [], message, rpc, time.monotonic())
    computed.assert_not_called()
    engine.admission.leave("greedy", 0, computed=True)
    assert engine.compute_at_once(request, [], message, rpc, time.monotonic()) == []
    engine.close()


def test_requests_that_were_given_up_do_not_count_as_computed(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    left, leave = list[bool](), peer.engine.admission.leave

    def note(client: str, nbytes: int, *, computed: bool) -> None:
        left.append(computed)
        leave(client, nbytes, computed=computed)

    monkeypatch.setattr(peer.engine.admission, "leave", note)
    request = request_of(inputs()).SerializeToString()
    peer.unary("FusedBatchNormGradV3", request)
    wait_until(lambda: left == [True])
    peer.engine.batcher.withdraw(peer.worker)
    with pytest.raises(grpc.RpcError):
        peer.unary("FusedBatchNormGradV3", request, timeout=2)  # so that it arrives on a busy machine, too
    wait_until(lambda: left == [True, False])


def test_an_unknown_method_is_unimplemented(peer: Peer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        peer.unary("FusedBatchNormGradV9", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
