"""Which of too many calls is cancelled, and when calls no longer count; behind a server with few calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from tests.unit.server.rpc.peers import identity
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_server.errors import UnauthenticatedError
from bngrad_server.rpc import rpc_limiter
from bngrad_server.rpc.rpc_limiter import RpcLimiter
from bngrad_server.security.auth import ALLOW_ALL, Authenticator
from bngrad_server.security.tokens import Tokens
from bngrad_wire.token_format import new_token

Connect = Callable[[], grpc.Channel]
HANDLER: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: request)


class Revocable(Authenticator):
    """Accepts calls until their tokens are revoked."""

    is_revoked = False

    def check_of(self, context: grpc.ServicerContext) -> Callable[[], object]:
        return self._check

    def _check(self) -> None:
        if self.is_revoked:
            raise UnauthenticatedError


@pytest.fixture
def authenticator() -> Revocable:
    return Revocable()


@pytest.fixture
def limiter(authenticator: Revocable) -> RpcLimiter:
    return RpcLimiter(3, authenticator)


@pytest.fixture
def connect(limiter: RpcLimiter, authenticator: Revocable) -> Iterator[Connect]:
    def stay(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        has_ended = threading.Event()
        context.add_callback(has_ended.set)
        yield request
        assert has_ended.wait(TIMEOUT_S)

    def revoke(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield request
        authenticator.is_revoked = True
        yield request

    def count(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        authenticator.is_revoked = True
        return b"%d" % len(list(requests))

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Stay": grpc.unary_stream_rpc_method_handler(stay),
        "Revoke": grpc.unary_stream_rpc_method_handler(revoke),
        "Count": grpc.stream_unary_rpc_method_handler(count),
    }
    server = grpc.server(ThreadPoolExecutor(), interceptors=[limiter])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    with ExitStack() as stack:
        yield lambda: stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", own_connection))
    server.stop(0).wait()


def begin(channel: grpc.Channel, name: str = "Stay") -> Any:
    call = channel.unary_stream(f"/test/{name}", identity, identity)(b"", timeout=TIMEOUT_S)
    assert next(call) == b""
    return call


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError):
        list(call)
    code: grpc.StatusCode = call.code()
    return code


def test_beyond_those_that_are_allowed_the_oldest_call_of_the_connection_with_most_is_cancelled(
    connect: Connect,
) -> None:
    modest, greedy = begin(connect()), connect()
    calls = [begin(greedy) for _ in range(4)]
    assert [code_of(call) for call in calls[:2]] == [grpc.StatusCode.CANCELLED] * 2
    assert all(call.is_active() for call in (modest, *calls[2:]))


def test_calls_that_have_ended_do_not_count_and_are_forgotten(connect: Connect, limiter: RpcLimiter) -> None:
    for _ in range(2):
        channel = connect()
        calls = [begin(channel) for _ in range(3)]
        assert all(call.is_active() for call in calls)
        for call in calls:
            call.cancel()
        wait_until(lambda: not limiter._calls)
    assert code_of(begin_all(connect())[0]) is grpc.StatusCode.CANCELLED
    wait_until(lambda: sum(map(len, limiter._calls.values())) == 3)


def begin_all(channel: grpc.Channel) -> list[Any]:
    """Begins one more call than are allowed."""
    return [begin(channel) for _ in range(4)]


@pytest.mark.parametrize(("has_ended", "cancelled"), [(False, [1, 1, 0]), (True, [0, 0, 0])])
def test_a_call_that_is_cancelled_or_has_ended_already_no_longer_counts(has_ended: bool, cancelled: list[int]) -> None:
    """Although grpcio has not reported the end of those that are cancelled yet."""
    limiter = RpcLimiter(1, ALLOW_ALL)
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    limited = limiter.intercept_service(lambda details: handler, None)
    returns = {"add_callback.return_value": not has_ended, "peer.return_value": "peer"}
    contexts = [mock.Mock(**returns) for _ in range(3)]
    for context in contexts:
        assert limited.stream_unary(iter([b"request"]), context) == b"request"
    assert [context.cancel.call_count for context in contexts] == cancelled
    for context in contexts:
        context.add_callback.call_args.args[0]()
    assert limiter._count == 0


def test_a_call_no_longer_counts_if_grpcio_has_no_memory_to_tell_of_its_end() -> None:
    limiter = RpcLimiter(1, ALLOW_ALL)
    context = mock.Mock(**{"add_callback.side_effect": MemoryError, "peer.return_value": "peer"})
    with pytest.raises(MemoryError):
        limiter.intercept_service(lambda details: HANDLER, None).stream_unary(iter([b"request"]), context)
    assert limiter._count == 0


def test_a_call_is_refused_once_its_token_is_revoked(connect: Connect, authenticator: Revocable) -> None:
    channel = connect()
    assert code_of(begin(channel, "Revoke")) is grpc.StatusCode.UNAUTHENTICATED
    authenticator.is_revoked = False
    with pytest.raises(grpc.RpcError) as refused:
        channel.stream_unary("/test/Count", identity, identity)(iter([b"", b""]), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_call_that_sends_and_receives_nothing_ends_too_once_its_token_is_revoked(
    connect: Connect, limiter: RpcLimiter, authenticator: Revocable
) -> None:
    call = begin(connect())
    limiter._end_revoked()
    assert call.is_active()
    authenticator.is_revoked = True
    limiter._end_revoked()
    assert code_of(call) is grpc.StatusCode.CANCELLED


def revoking_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "revoked-tokens"]


def test_a_thread_looks_for_revoked_tokens_where_there_are_tokens_until_the_limiter_is_closed(tmp_path: Path) -> None:
    before = revoking_threads()
    RpcLimiter(1, ALLOW_ALL).close()
    assert revoking_threads() == before
    (tmp_path / "tokens").write_text(new_token("alice")[1])
    limiter = RpcLimiter(1, Authenticator(Tokens(tmp_path / "tokens")))
    (thread,) = set(revoking_threads()) - set(before)
    limiter.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_the_next_look_for_revoked_tokens_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_limiter, "_CHECK_INTERVAL_S", 0.01)
    errors, looks_again = iter([KeyError()]), threading.Event()

    def refresh() -> None:
        for error in errors:
            raise error
        looks_again.set()

    limiter = RpcLimiter(1, mock.Mock(requires_token=True, refresh=refresh))
    assert looks_again.wait(TIMEOUT_S)
    limiter.close()


def test_a_call_without_a_message_is_refused(connect: Connect) -> None:
    call = connect().stream_stream("/test/Stay", identity, identity)(iter([]), timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError, match="the call has no request") as refused:
        list(call)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_that_is_cancelled_before_its_message_has_arrived_no_longer_counts(
    connect: Connect, limiter: RpcLimiter
) -> None:
    may_end = threading.Event()

    def messages() -> Iterator[bytes]:
        may_end.wait(TIMEOUT_S)
        yield from ()

    call = connect().stream_stream("/test/Stay", identity, identity)(messages(), timeout=TIMEOUT_S)
    wait_until(lambda: limiter._count == 1)
    call.cancel()
    wait_until(lambda: limiter._count == 0)
    may_end.set()


def test_a_call_that_ends_while_it_waits_for_its_message_is_aborted_as_cancelled() -> None:
    limited = RpcLimiter(1, ALLOW_ALL).intercept_service(lambda details: HANDLER, None)
    context = mock.Mock(**{"abort.side_effect": KeyError, "peer.return_value": "peer"})
    error = grpc.RpcError()
    with pytest.raises(KeyError):
        limited.stream_unary(mock.MagicMock(__next__=mock.Mock(side_effect=error)), context)
    assert context.abort.call_args.args[0] is grpc.StatusCode.CANCELLED
    assert error.__traceback__ is None


def test_each_look_for_revoked_tokens_reads_the_tokens_first(authenticator: Revocable) -> None:
    authenticator.refresh = mock.Mock()  # type: ignore[method-assign]
    RpcLimiter(1, authenticator)._end_revoked()
    authenticator.refresh.assert_called_once_with()


def test_ops_and_unknown_methods_are_left_as_they_are() -> None:
    limiter = RpcLimiter(1, ALLOW_ALL)
    assert limiter.intercept_service(lambda details: None, None) is None
    own_threads: Any = grpc.unary_unary_rpc_method_handler(mock.Mock(experimental_thread_pool=None))
    assert limiter.intercept_service(lambda details: own_threads, None) is own_threads
    assert limiter.intercept_service(lambda details: HANDLER, None) is not HANDLER


def test_messages_are_read_and_written_as_the_handler_says() -> None:
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: request, int, str.encode)
    limited = RpcLimiter(1, ALLOW_ALL).intercept_service(lambda details: handler, None)
    assert (limited.request_deserializer, limited.response_serializer) == (int, str.encode)
