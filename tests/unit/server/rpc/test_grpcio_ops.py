"""What calls of ops on the grpcio port count for, what they take, and that they give it back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from tests.unit.server.rpc.peers import ARENA_NBYTES, Metadata, Peer, identity, peer_behind
from tests.unit.server.workers.additions import TIMEOUT_S, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.config import MAX_CALLS, ServerConfig
from bngrad_server.errors import OverloadedError, UnauthenticatedError
from bngrad_server.rpc import futile_calls, grpcio_calls, grpcio_ops
from bngrad_server.rpc.fair_shares import FairShares
from bngrad_server.rpc.futile_calls import FutileCalls
from bngrad_server.rpc.grpcio_port import GrpcioPort
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.servicer import EXCHANGE_PATH, UNARY_OPS, Servicer
from bngrad_server.rpc_context import MessageTraffic, RpcContext
from bngrad_server.runtime import traffic_accounts
from bngrad_server.runtime.executors import HandlerExecutor
from bngrad_server.runtime.tcp_throttle import TcpThrottle
from bngrad_server.security.auth import ALLOW_ALL, Authenticator
from bngrad_server.security.tokens import Tokens
from bngrad_server.telemetry.load import LoadTrailers
from bngrad_wire.load_report import TEXT_HEADER, LoadReport
from bngrad_wire.token_format import new_token

(UNARY_PATH, UNARY_NAME), *_ = UNARY_OPS.items()
OP_NBYTES = traffic_accounts._OP_NBYTES
REQUEST = request_of(inputs()).SerializeToString()
CHUNKS = [pb.ExchangeRequest(chunk=inputs()[name].tobytes()).SerializeToString() for name in ("y_backprop", "x")]
EXCHANGE = pb.ExchangeRequest(fused_batch_norm_grad_v3=request_of(inputs(), chunked=True)).SerializeToString()
MESSAGES = {UNARY_PATH: [REQUEST], EXCHANGE_PATH: [EXCHANGE, *CHUNKS]}
(ALICES_TOKEN, ALICES_LINE), (BOBS_TOKEN, BOBS_LINE) = new_token("alice"), new_token("bob")
ALICE, BOB = ((("authorization", f"Bearer {token}"),) for token in (ALICES_TOKEN, BOBS_TOKEN))
ON_EACH_PATH = pytest.mark.parametrize("path", MESSAGES, ids=["unary", "exchange"])


class Shares(FairShares):
    """Notes which parts are asked for, and how long calls may wait for them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[tuple[int, float | None]] = []

    def part(
        self, client: str, amount: int, context: grpc.ServicerContext, timeout_s: float | None = None
    ) -> AbstractContextManager[None]:
        self.asked.append((amount, timeout_s))
        return super().part(client, amount, context, timeout_s)


class Port:
    """A grpcio port that notes what its handlers do.

    Attributes:
        contexts: What was known of its calls.
        traffics: The traffic of its exchanges.
        shares: What its calls take parts of: places for unary calls, places for exchanges, memory for unsent answers.
        futile: Which calls were cancelled.
        throttle: What the calls count for.
    """

    throttle: TcpThrottle

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: list[RpcContext] = []
        self.traffics: list[MessageTraffic] = []
        self.shares: list[Shares] = []
        self.futile = FutileCalls()

        def noted(made: list[Any], make: Any) -> Any:
            return lambda *args: made.append(make(*args)) or made[-1]  # type: ignore[func-returns-value]

        monkeypatch.setattr(grpcio_ops, "rpc_context", noted(self.contexts, grpcio_calls.rpc_context))
        monkeypatch.setattr(grpcio_ops, "MessageTraffic", noted(self.traffics, MessageTraffic))
        monkeypatch.setattr(grpcio_ops, "FairShares", noted(self.shares, Shares))
        monkeypatch.setattr(grpcio_ops, "FutileCalls", lambda: self.futile)

    @contextmanager
    def serve(self, config: ServerConfig, servicer: Servicer, path: Path) -> Iterator[None]:
        port = GrpcioPort(config, servicer, Health(("",)), None)
        port.listen(f"unix:{path}")
        port.start()
        self.throttle = port._throttle
        try:
            yield
        finally:
            port.stop(0).wait()

    @property
    def useful(self) -> int:
        """What the messages of its clients count for."""
        return sum(peer.useful for peer in list(self.throttle._peers.values()))

    @property
    def account(self) -> str:
        """In which account the last call of its only peer counts: all connections to a Unix socket are one peer."""
        (peer,) = self.throttle._peers.values()
        return peer.account

    def is_at_rest(self) -> bool:
        """Whether all parts were given back, and no call waits for messages."""
        has_all = all(shares._free == shares._total for shares in self.shares)
        return has_all and not any(peer.waiting or peer.receiving for peer in list(self.throttle._peers.values()))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    return Port(monkeypatch)


@pytest.fixture
def peer(port: Port, tmp_path: Path) -> Iterator[Peer]:
    with peer_behind(port.serve, tmp_path) as peer:
        yield peer
        wait_until(port.is_at_rest)


@pytest.fixture
def guarded(port: Port, tmp_path: Path) -> Iterator[Peer]:
    """The same with tokens, of Alice and Bob."""
    (tmp_path / "tokens").write_text(f"{ALICES_LINE}\n{BOBS_LINE}\n")
    with peer_behind(port.serve, tmp_path, Authenticator(Tokens(tmp_path / "tokens"))) as peer:
        yield peer
        wait_until(port.is_at_rest)


def begin(
    peer: Peer, path: str, messages: list[bytes] | None = None, timeout: float | None = TIMEOUT_S, meta: Metadata = ()
) -> Any:
    """Begins a call; a unary one is the same on the wire as one that streams."""
    call = peer.channel.stream_stream(path, identity, identity)
    return call(iter(MESSAGES[path] if messages is None else messages), timeout=timeout, metadata=meta)


def cancel_one(peer: Peer, port: Port, path: str, meta: Metadata = ()) -> None:
    """Makes a call that is cancelled while a worker computes it."""
    peer.worker.may_run.clear()
    batches = len(peer.worker.batches)
    call = begin(peer, path, meta=meta)
    wait_until(lambda: len(peer.worker.batches) > batches)
    call.cancel()
    wait_until(port.contexts[-1].is_cancelled)
    peer.worker.may_run.set()
    wait_until(lambda: peer.engine.admission.admitted == 0)


@ON_EACH_PATH
def test_what_is_sent_and_answered_counts_for_its_client(peer: Peer, port: Port, path: str) -> None:
    answers = list(begin(peer, path))
    sent = sum(map(len, MESSAGES[path]))
    wait_until(lambda: port.useful == sent + len(answers) * OP_NBYTES)


@ON_EACH_PATH
def test_a_call_that_has_its_place_may_send(peer: Peer, port: Port, path: str) -> None:
    peer.worker.may_run.clear()
    call = begin(peer, path)
    wait_until(lambda: len(peer.worker.batches) == 1)
    (traffic,) = port.throttle._peers.values()
    assert (traffic.waiting, traffic.receiving) == (0, 1)
    peer.worker.may_run.set()
    assert list(call)


@ON_EACH_PATH
@pytest.mark.parametrize("message", [b"\xff", b""], ids=["malformed", "invalid"])
def test_a_wrong_request_counts_against_its_client(peer: Peer, port: Port, path: str, message: bytes) -> None:
    with pytest.raises(grpc.RpcError):
        list(begin(peer, path, [message]))
    wait_until(lambda: port.useful == -OP_NBYTES)


@ON_EACH_PATH
def test_what_is_sent_is_excused_where_the_server_has_no_room(peer: Peer, port: Port, path: str) -> None:
    full = mock.patch.object(peer.engine.admission, "_check", side_effect=OverloadedError("full"))
    with full, pytest.raises(grpc.RpcError, match="full"):
        list(begin(peer, path))
    sent = len(MESSAGES[path][0])
    wait_until(lambda: port.useful == sent + traffic_accounts._BEGINNING_NBYTES // 2)


@ON_EACH_PATH
def test_a_call_that_is_cancelled_counts_against_its_client_until_one_is_answered(
    peer: Peer, port: Port, path: str
) -> None:
    cancel_one(peer, port, path)
    wait_until(lambda: port.useful == -OP_NBYTES)
    wait_until(lambda: len(port.futile._cancelled) == 1)
    (client,) = port.futile._cancelled._counts
    assert client == port.contexts[0].client
    list(begin(peer, path))
    wait_until(lambda: len(port.futile._cancelled) == 0)


@ON_EACH_PATH
def test_a_call_whose_deadline_passes_does_not_count_against_its_client(
    peer: Peer, port: Port, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futile_calls, "_LATENCY_S", 2 * TIMEOUT_S)  # the deadline counts as past all along
    cancel_one(peer, port, path)
    wait_until(port.is_at_rest)
    assert port.useful == sum(map(len, MESSAGES[path]))
    assert len(port.futile._cancelled) == 0


def test_a_client_that_cancels_too_many_calls_is_refused_and_paused_and_others_are_not(
    guarded: Peer, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futile_calls, "_MOST", 0.0)
    cancel_one(guarded, port, UNARY_PATH, ALICE)
    wait_until(lambda: port.futile.are_too_many("token alice"))
    assert not port.throttle._refused
    for path in MESSAGES:
        with pytest.raises(grpc.RpcError, match="this client has cancelled too many calls") as refused:
            list(begin(guarded, path, meta=ALICE))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert port.throttle._refused == {"token alice"}
    assert refused_calls(guarded) == 2
    list(begin(guarded, UNARY_PATH, meta=BOB))


def refused_calls(peer: Peer) -> int:
    count: int = peer.engine.observer.metrics.status()["refused_calls"]["RESOURCE_EXHAUSTED"]
    return count


def test_clients_that_are_not_known_are_not_refused_for_calls_of_others(
    peer: Peer, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futile_calls, "_MOST", 0.0)
    cancel_one(peer, port, UNARY_PATH)
    wait_until(lambda: port.futile.are_too_many(port.contexts[0].client))
    assert list(begin(peer, UNARY_PATH))


@ON_EACH_PATH
def test_calls_are_refused_and_counted_while_too_many_wait_for_a_thread(
    peer: Peer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpcio_ops, "_MAX_QUEUE", 0)
    with pytest.raises(grpc.RpcError, match="too many calls wait for a thread"):
        list(begin(peer, path))
    assert refused_calls(peer) == 1


@ON_EACH_PATH
def test_unary_calls_and_exchanges_wait_for_threads_of_their_own(
    peer: Peer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "grpcio-exchange" if path == EXCHANGE_PATH else "grpcio-unary"
    queue_size = property(lambda executor: grpcio_ops._MAX_QUEUE if executor._pool._name == full else 0)
    monkeypatch.setattr(HandlerExecutor, "queue_size", queue_size)
    with pytest.raises(grpc.RpcError, match="too many calls wait for a thread"):
        list(begin(peer, path))
    (other,) = MESSAGES.keys() - {path}
    assert list(begin(peer, other))


def test_an_answer_takes_memory_for_its_copies_and_a_call_a_place(peer: Peer, port: Port) -> None:
    (answer,) = begin(peer, UNARY_PATH)
    list(begin(peer, EXCHANGE_PATH))
    unary, exchange, unsent = port.shares
    wait_s = peer.engine.max_wait_s
    assert unary.asked == [(1, wait_s)]
    assert exchange.asked == [(1, None)]
    assert unsent.asked == [(2 * len(answer) + grpcio_ops._UNSENT_NBYTES, wait_s)]
    assert [unary._total, exchange._total, unsent._total] == [MAX_CALLS, MAX_CALLS, ARENA_NBYTES // 2]
    assert unary._max_waiting == exchange._max_waiting == 512 - MAX_CALLS - grpcio_ops.FREE_THREADS
    assert unsent._max_waiting == math.inf


def test_a_unary_call_waits_for_its_place_while_its_client_is_at_its_limits(
    peer: Peer, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message says how large the request is, so that it would be received in vain."""
    admission, (unary, exchange, _) = peer.engine.admission, port.shares
    monkeypatch.setattr(admission, "_refused_of", {"client": (2**21, math.inf)})
    monkeypatch.setattr(admission, "_max_client_bytes", 2**20)
    assert not unary._is_worthwhile("client")
    assert exchange._is_worthwhile("client")
    assert admission.on_leave == [unary.serve]


@ON_EACH_PATH
def test_a_call_that_was_cancelled_before_its_turn_takes_nothing(
    peer: Peer, port: Port, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rpc_context(context: grpc.ServicerContext, name: str, authenticator: Authenticator) -> RpcContext:
        end(context)
        return grpcio_calls.rpc_context(context, name, authenticator)

    monkeypatch.setattr(grpcio_ops, "rpc_context", rpc_context)
    with pytest.raises(grpc.RpcError) as refused:
        list(begin(peer, path))
    assert refused.value.code() is grpc.StatusCode.CANCELLED
    wait_until(lambda: port.useful == -OP_NBYTES)
    assert not any(shares.asked for shares in port.shares)


def end(context: grpc.ServicerContext) -> None:
    """Cancels a call, and waits until its handler can know."""
    context.cancel()
    wait_until(lambda: not context.is_active())


def test_the_memory_of_an_answer_comes_back_if_its_call_ends_before_it_is_sent(
    peer: Peer, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpcio_ops, "_report_load", lambda load, peer, context: end(context))
    with pytest.raises(grpc.RpcError):
        list(begin(peer, UNARY_PATH))
    assert port.shares[2].asked
    wait_until(port.is_at_rest)
    wait_until(lambda: peer.is_at_rest and peer.engine.admission.admitted == 0)


def test_the_memory_of_an_answer_comes_back_if_the_handler_fails(
    peer: Peer, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpcio_ops, "_report_load", mock.Mock(side_effect=MemoryError))
    with pytest.raises(grpc.RpcError, match="no memory left"):
        list(begin(peer, UNARY_PATH))
    wait_until(port.is_at_rest)


def test_the_memory_of_an_answer_comes_back_if_grpcio_has_none_to_tell_of_its_end(
    peer: Peer, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpc._server._Context.add_callback", mock.Mock(side_effect=MemoryError))
    with pytest.raises(grpc.RpcError, match="no memory left"):
        list(begin(peer, UNARY_PATH))
    wait_until(port.is_at_rest)


@ON_EACH_PATH
def test_an_answer_reports_the_load_unless_its_client_knows_it(peer: Peer, path: str) -> None:
    peer.engine.load.trailers = lambda: report  # type: ignore[method-assign]
    report = LoadTrailers(LoadReport(1.0, 0.5, 1.0))

    def has_report() -> bool:
        call = begin(peer, path)
        list(call)
        return TEXT_HEADER in dict(call.trailing_metadata())

    assert has_report()
    with mock.patch("random.random", return_value=1.0):
        assert not has_report()
    report = LoadTrailers(LoadReport(2.0, 0.5, 1.0))
    assert has_report()


def test_an_exchange_makes_progress_with_each_chunk_and_each_answer(peer: Peer, port: Port) -> None:
    answers = list(begin(peer, EXCHANGE_PATH))
    (traffic,) = port.traffics
    wait_until(lambda: traffic.moved == sum(map(len, CHUNKS)) + sum(map(len, answers)))


def test_a_unary_call_without_a_request_is_counted(peer: Peer) -> None:
    with pytest.raises(grpc.RpcError, match="the call has no request"):
        list(begin(peer, UNARY_PATH, []))
    assert (UNARY_NAME, "unary", "INVALID_ARGUMENT", 1) in peer.engine.observer.metrics.status()["requests"]


def test_a_call_is_known_by_its_deadline_and_its_text_metadata(peer: Peer, port: Port) -> None:
    before = time.monotonic()
    for timeout in (TIMEOUT_S, None):
        list(begin(peer, UNARY_PATH, timeout=timeout, meta=(("name", "value"), ("name-bin", b"\xff"))))  # type: ignore[arg-type]
    limited, endless = port.contexts
    assert limited.deadline is not None
    assert before < limited.deadline < time.monotonic() + TIMEOUT_S + 1
    assert endless.deadline is None
    assert limited.metadata["name"] == "value"
    assert "name-bin" not in limited.metadata
    assert limited.client.startswith("unix:")
    assert port.account == limited.client


def test_a_call_belongs_to_the_owner_of_its_token_until_that_is_revoked(guarded: Peer, port: Port) -> None:
    list(begin(guarded, UNARY_PATH, meta=BOB))
    (rpc,) = port.contexts
    assert rpc.client == port.account == "token bob"
    rpc.check()
    with mock.patch.object(Tokens, "owner", return_value=None), pytest.raises(UnauthenticatedError):
        rpc.check()


@pytest.mark.parametrize(
    ("name", "host"),
    [("ipv4:127.0.0.1:50051", "127.0.0.1"), ("ipv6:%5B::1%5D:50051", "::1"), ("unix:", "unix:")],
)
def test_a_client_without_a_name_is_its_host(name: str, host: str) -> None:
    context = mock.Mock(invocation_metadata=lambda: (), time_remaining=lambda: None)
    assert grpcio_calls.rpc_context(context, name, ALLOW_ALL).client == host


def test_a_client_that_shows_a_certificate_is_known_and_accounted_for_by_its_name_and_its_calls_can_be_ended() -> None:
    context = mock.Mock(invocation_metadata=lambda: (), time_remaining=lambda: None)
    context.auth_context.return_value = {"x509_common_name": [b"alice"]}
    for authenticator, client in ((Authenticator(requires_certificate=True), "certificate alice"), (ALLOW_ALL, "::1")):
        rpc = grpcio_calls.rpc_context(context, "ipv6:%5B::1%5D:50051", authenticator)
        assert rpc.client == client
        assert grpcio_calls.account_of(rpc, authenticator) == (None if authenticator is ALLOW_ALL else client)
        rpc.abort()
    assert context.cancel.call_count == 2


@ON_EACH_PATH
def test_a_call_whose_client_does_not_send_its_message_is_ended_in_time(
    peer: Peer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.engine.transfers, "_timeout_s", 0.1)
    may_end = threading.Event()

    def messages() -> Iterator[bytes]:
        may_end.wait(TIMEOUT_S)
        yield from ()

    call = peer.channel.stream_stream(path, identity, identity)(messages(), timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as refused:
        list(call)
    may_end.set()
    assert refused.value.code() is grpc.StatusCode.CANCELLED
