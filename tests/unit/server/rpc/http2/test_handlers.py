"""What threads receive of calls, and when they give up; with real sockets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.unit.server.rpc.http2.service import (
    INVALID_ARGUMENT,
    PATH,
    REQUEST,
    RESOURCE_EXHAUSTED,
    Service,
    all_memory,
    ask,
    ask_by_chunks,
    check_answered,
    check_answered_by_chunks,
    code_of,
    read_answer,
    receiving,
)
from tests.unit.server.workers.additions import NBYTES, TIMEOUT_S, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.memory.allocator import Block
from bngrad_server.rpc.http2 import handlers
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SEND_AHEAD_PATH, SERVER_INFO_PATH
from bngrad_server.rpc_context import RpcContext
from bngrad_server.security.auth import Authenticator
from bngrad_server.security.tokens import Tokens
from bngrad_server.telemetry.load import LoadTrailers
from bngrad_wire import http2
from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames
from bngrad_wire.http2.sending import PREFIX
from bngrad_wire.load_report import LoadReport
from bngrad_wire.token_format import new_token

UNIMPLEMENTED = 12
CHUNKED = pb.ExchangeRequest(fused_batch_norm_grad_v3=request_of(inputs(), chunked=True))
Send = Callable[[http2.ClientConnection], http2.ClientCall]


@pytest.mark.parametrize("begun", [b"", PREFIX.pack(0, 100) + bytes(10)], ids=["nothing", "half a message"])
def test_a_client_that_does_not_send_its_message_is_cut_off_in_time(
    service: Service, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(service.engine.transfers, "_timeout_s", 0.1)
    calls = []
    for path in (PATH, EXCHANGE_PATH, SEND_AHEAD_PATH, SERVER_INFO_PATH):
        client = service.connect()
        calls.append(client.call(path))
        client.outbound.append(frames.frame(frames.DATA, 0, calls[-1].id, begun))
        client.flush()
    for call in calls:
        with pytest.raises(http2.PeerGoneError):
            call.receive_message()
    wait_until(lambda: len(service.port._connections) == 0)  # though the client does not close its end


@pytest.mark.parametrize("send", [ask, ask_by_chunks])
@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_call_whose_client_has_gone_waits_for_no_memory(
    service: Service, monkeypatch: pytest.MonkeyPatch, send: Send, how: str
) -> None:
    monkeypatch.setattr(service.engine, "max_wait_s", 2 * TIMEOUT_S)
    arena, blocks = service.engine.arena, all_memory(service)
    call = send(service.connect())
    wait_until(lambda: arena.is_waited_for)
    if how == "closes":
        call._connection.close()
    else:
        call.cancel()
    wait_until(lambda: not arena.is_waited_for)
    for block in blocks:
        arena.free(block)


@pytest.mark.parametrize(
    ("send", "check", "request_bytes"),
    [(ask, check_answered, REQUEST), (ask_by_chunks, check_answered_by_chunks, CHUNKED.SerializeToString())],
    ids=["unary", "exchange"],
)
def test_a_message_beyond_the_limit_is_refused(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    send: Send,
    check: Callable[[http2.ClientCall], None],
    request_bytes: bytes,
) -> None:
    monkeypatch.setattr(service.engine, "max_message_nbytes", len(request_bytes) - 1)
    assert code_of(send(service.connect())) == RESOURCE_EXHAUSTED
    monkeypatch.setattr(service.engine, "max_message_nbytes", len(request_bytes))
    check(send(service.connect()))


def test_a_request_that_is_refused_for_its_size_is_counted(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine, "max_message_nbytes", 100)
    assert code_of(ask(service.connect())) == RESOURCE_EXHAUSTED
    requests = service.engine.observer.metrics.status()["requests"]
    assert requests == [("FusedBatchNormGradV3", "unary", "RESOURCE_EXHAUSTED", 1)]


@pytest.mark.parametrize(
    "message",
    [pb.ExchangeRequest(chunk=bytes(2**17)).SerializeToString(), b"\xf2\x7f\x80\x80\x08" + bytes(2**17) + b"\xff"],
    ids=["stray chunk", "malformed at its end"],
)
def test_a_long_message_that_is_no_request_is_refused_and_its_memory_comes_back(
    service: Service, message: bytes
) -> None:
    call = service.connect().call(EXCHANGE_PATH)
    call.send_message(message)
    assert code_of(call) == INVALID_ARGUMENT
    wait_until(lambda: service.engine._messages.used_bytes == 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_without_a_message_is_one_with_an_empty_message(service: Service, is_late: bool) -> None:
    client = service.connect()
    call = client.call(PATH)
    if is_late:
        client.flush()
        wait_until(lambda: receiving(service) == 1)
    call.half_close()
    assert code_of(call) == INVALID_ARGUMENT


def test_a_connection_waits_as_long_as_before_after_a_call_that_is_no_op(service: Service) -> None:
    client = service.connect()
    check_answered(ask(client))
    (connection,) = service.port._connections._all
    waits = connection.http.io.waits
    call = client.call(SERVER_INFO_PATH)
    call.send_message(b"", end=True)
    assert call.receive_message()
    assert call.receive_message() is None
    assert connection.http.io.waits == waits


@pytest.mark.parametrize("has_tokens", [False, True])
def test_memory_is_lent_to_clients_only_where_no_token_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tokens: bool
) -> None:
    lent = []
    checked_context = handlers.Http2Handler.checked_context

    def check_and_note(handler: handlers.Http2Handler, call: http2.ServerCall) -> RpcContext:
        rpc = checked_context(handler, call)
        lent.append(call.lends_memory)
        return rpc

    monkeypatch.setattr(handlers.Http2Handler, "checked_context", check_and_note)
    token, line = new_token("alice")
    path = tmp_path / "tokens"
    path.write_text(line)
    service = Service(tmp_path, Authenticator(Tokens(path) if has_tokens else None))
    check_answered(ask(service.connect(), metadata=(("authorization", f"Bearer {token}"),)))
    service.close()
    assert lent == [not has_tokens]


def test_a_call_that_is_not_served_is_counted_and_its_path_is_told_cut(service: Service) -> None:
    call = service.connect().call("/" + "x" * 1000)
    call.half_close()
    with pytest.raises(http2.RpcError, match=r" /x{100,999}\.\.\. is not served here$") as caught:
        call.receive_message()
    assert caught.value.code == UNIMPLEMENTED
    assert service.engine.observer.metrics.status()["refused_calls"]["UNIMPLEMENTED"] == 1


def test_the_context_of_a_call_is_that_of_its_headers_and_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[RpcContext] = []
    checked_context = handlers.Http2Handler.checked_context

    def check_and_note(handler: handlers.Http2Handler, call: http2.ServerCall) -> RpcContext:
        contexts.append(checked_context(handler, call))
        return contexts[-1]

    monkeypatch.setattr(handlers.Http2Handler, "checked_context", check_and_note)
    began = time.monotonic()
    check_answered(ask(service.connect(), timeout_s=60.0, metadata=(("name", "value"),)))
    (rpc,), (connection,) = contexts, service.port._connections._all
    assert rpc.client == f"process {os.getpid()}"
    assert rpc.metadata["name"] == "value"
    assert rpc.deadline is not None
    assert began < rpc.deadline - 59.0 < time.monotonic() + 1.0
    assert rpc.traffic.moved == connection.http.io.moved > len(REQUEST)


@pytest.mark.parametrize("how", ["at once", "inline", "by a thread"])
def test_a_connection_is_told_of_a_load_once(service: Service, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    report = LoadTrailers(LoadReport(100.0, 0.5, 1.0))
    monkeypatch.setattr(service.servicer.load, "trailers", lambda: report)
    if how == "at once":
        call = ask(service.connect())
        response = call.read(call.receive_message() or 0)
        monkeypatch.setattr(service.servicer, "answer_at_once", lambda *args, **options: [response])
    elif how == "by a thread":
        monkeypatch.setattr(handlers, "_AT_ONCE_NBYTES", 100)
    client = service.connect()
    for is_first in (True, False):
        check_answered(ask(client))
        assert (client.load_text is not None) == is_first
        client.load_text = None


def test_the_event_loop_answers_at_once_only_what_its_client_has_a_window_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, bool]] = []

    def note(path: str, received: Sequence[Buffer], rpc: RpcContext, room: float, *, in_event_loop: bool) -> None:
        asked.append((room, in_event_loop))

    monkeypatch.setattr(service.servicer, "answer_at_once", note)
    client = service.connect()
    client.outbound.append(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
    call = ask(client)
    wait_until(lambda: bool(asked))
    call.cancel()
    assert asked == [(100, True)]


def test_an_sdk_receives_chunks_of_its_own_size_however_it_is_answered(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_SDK_CHUNK_NBYTES", 100)
    client = service.connect()
    for at_once_nbytes in (NBYTES * 2, NBYTES * 2, 100):  # by the receiving thread, the event loop, another thread
        monkeypatch.setattr(handlers, "_AT_ONCE_NBYTES", at_once_nbytes)
        call, received = ask_by_chunks(client), 0
        while call.receive_message() is not None:
            received += 1
        assert received == 1 + -(-NBYTES // 100)


def ask_other(client: http2.ClientConnection, *requests: bytes, is_ended: bool = True) -> http2.ClientCall:
    """Makes a unary call that is no op, with some messages."""
    call = client.call(SERVER_INFO_PATH)
    for request in requests:
        call.send_message(request, more=True)
    if is_ended:
        call.half_close()
    client.flush()
    return call


def check_answered_once(call: http2.ClientCall) -> None:
    nbytes = call.receive_message()
    assert nbytes is not None
    assert pb.ServerInfoResponse.FromString(call.read(nbytes)).version
    assert call.receive_message() is None


def test_a_call_that_is_no_op_has_a_short_message(service: Service) -> None:
    client = service.connect()
    check_answered_once(ask_other(client, bytes(64 * 1024)))
    call = ask_other(client, bytes(64 * 1024 + 1))
    with pytest.raises(http2.RpcError, match="the request must have at most 65536 bytes, not 65537") as refused:
        call.receive_message()
    assert refused.value.code == RESOURCE_EXHAUSTED
    check_answered_once(ask_other(client, b""))


def test_a_call_that_is_no_op_needs_a_message(service: Service) -> None:
    with pytest.raises(http2.RpcError, match="the call has no request") as refused:
        ask_other(service.connect()).receive_message()
    assert refused.value.code == INVALID_ARGUMENT


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_unary_call_that_is_no_op_is_answered_once_and_ended_whatever_else_its_client_sends(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    monkeypatch.setattr(handlers, "_OTHER_WAITS", 1)
    client = service.connect()
    for requests in ((b"",), (b"", b"")):
        check_answered_once(ask_other(client, *requests, is_ended=is_ended))
    check_answered(ask(client))


LARGE = (2, 16, 32, 16)
"""A shape whose answers are sent without a copy."""


def x_backprop(client: http2.ClientConnection, how: str) -> bytes:
    """Makes a call whose message arrives as ``how`` says, and returns what is large in the answer."""
    if how == "by chunks":
        call, chunks = ask_by_chunks(client, shape=LARGE), []
        while (nbytes := call.receive_message()) is not None:
            chunks.append(pb.ExchangeResponse.FromString(call.read(nbytes)).chunk)
        return b"".join(chunks)
    request = request_of(inputs(shape=LARGE)).SerializeToString()
    if how == "whole":
        return read_answer(ask(client, request)).x_backprop.data
    call = client.call(PATH)
    client.ping()
    while client.unanswered_ping:
        client.handle_frame()
    call.send_message(request, end=True)
    return read_answer(call).x_backprop.data


@pytest.mark.parametrize("at_once_nbytes", [100, 2**20], ids=["sent by a thread", "sent by the event loop"])
@pytest.mark.parametrize("how", ["whole", "in parts", "by chunks"])
def test_an_answer_is_sent_before_its_memory_is_used_again(
    service: Service, monkeypatch: pytest.MonkeyPatch, how: str, at_once_nbytes: int
) -> None:
    arena, free, freed = service.engine.arena, service.engine.arena.free, list[Block]()

    def overwrite(block: Block) -> None:
        arena.view[block.offset : block.offset + block.nbytes] = b"\xff" * block.nbytes
        freed.append(block)
        free(block)

    monkeypatch.setattr(arena, "free", overwrite)
    monkeypatch.setattr(handlers, "_AT_ONCE_NBYTES", at_once_nbytes)
    client, arrays = service.connect(), inputs(shape=LARGE)
    for _ in range(2):  # an exchange is received by a thread, then by the event loop
        assert x_backprop(client, how) == (arrays["x"] + arrays["y_backprop"]).tobytes()
    wait_until(lambda: len(freed) == 2)
