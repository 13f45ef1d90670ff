"""Where the grpcio port listens, what it serves beside the ops, and what the HTTP/2 port answers of that."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.raw_http2 import PREFACE, RawConnection
from tests.unit.server.rpc.peers import ARENA_NBYTES, identity
from tests.unit.server.workers.additions import TIMEOUT_S

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.config import MAX_CALLS, ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.errors import ListenError
from bngrad_server.rpc import grpcio_port
from bngrad_server.rpc.grpcio_port import GrpcioPort
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.other_calls import REFLECTED, REFLECTION_PATH, other_calls
from bngrad_server.rpc.servicer import SERVER_INFO_PATH, Servicer
from bngrad_wire.http2 import RpcError, frames

CHECK_PATH = f"/{health.SERVICE_NAME}/Check"
CHANNELZ_PATH = "/grpc.channelz.v1.Channelz/GetServers"
LIST = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()


@pytest.fixture
def servicer() -> Iterator[Servicer]:
    with closing(Engine(ServerConfig(arena_bytes=ARENA_NBYTES), lambda: None)) as engine:
        yield Servicer(engine)


@pytest.fixture
def port(servicer: Servicer) -> Iterator[GrpcioPort]:
    port = make_port(servicer)
    yield port
    port.stop(0).wait()


def make_port(servicer: Servicer, **settings: Any) -> GrpcioPort:
    return GrpcioPort(ServerConfig(arena_bytes=ARENA_NBYTES, **settings), servicer, Health(("",)), None)


def ask(address: str, path: str, message: bytes = b"") -> list[bytes]:
    with grpc.insecure_channel(address) as channel:
        return list(channel.stream_stream(path, identity, identity)(iter([message]), timeout=TIMEOUT_S))


def code_of(address: str, path: str) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        ask(address, path)
    code: grpc.StatusCode = refused.value.code()
    return code


def services_in(message: bytes) -> set[str]:
    response = reflection_pb2.ServerReflectionResponse.FromString(message)
    return {service.name for service in response.list_services_response.service}


def test_a_port_of_tcp_is_chosen_watched_and_told(port: GrpcioPort) -> None:
    address = port.listen("127.0.0.1:0")
    port.start()
    host, _, number = address.rpartition(":")
    assert host == "127.0.0.1"
    assert port._throttle.ports == {int(number)}
    assert pb.ServerInfoResponse.FromString(*ask(address, SERVER_INFO_PATH)).limits.arena_bytes == ARENA_NBYTES


def test_a_name_of_a_host_is_told_as_it_was_given(port: GrpcioPort) -> None:
    assert port.listen("localhost:0").startswith("localhost:")


def test_a_connection_may_have_as_many_calls_at_once_as_a_client_may(port: GrpcioPort, tmp_path: Path) -> None:
    address = port.listen(f"unix:{tmp_path}/calls")
    port.start()
    with RawConnection(address) as client:
        assert client.send(PREFACE)
        kind, values = next_frame(client.sock)
        assert kind == frames.SETTINGS
        assert dict(frames.SETTING.iter_unpack(values))[frames.MAX_CONCURRENT_STREAMS] == MAX_CALLS


def next_frame(sock: socket.socket) -> tuple[int, bytes]:
    length, kind, _, _ = frames.parse_header(sock.recv(frames.HEADER_NBYTES, socket.MSG_WAITALL), 0)
    return kind, sock.recv(length, socket.MSG_WAITALL)


def is_sent_away(sock: socket.socket) -> bool:
    """Whether the server ends a connection before its timeout."""
    with suppress(TimeoutError):
        while next_frame(sock)[0] != frames.GOAWAY:
            pass
        return True
    return False


@pytest.mark.parametrize("has_shown_it", [False, True])
def test_connections_of_clients_that_show_certificates_last_for_a_while(
    servicer: Servicer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_shown_it: bool
) -> None:
    """The certificate may be revoked."""
    monkeypatch.setattr(grpcio_port, "_MAX_AGE_MS", 100)
    files = {name: tmp_path / name for name in ("tls_certificate", "tls_key", "tls_client_ca")}
    port = make_port(servicer, **(files if has_shown_it else {}))
    address = port.listen(f"unix:{tmp_path}/calls")
    port.start()
    with RawConnection(address) as client:
        assert client.send(PREFACE)
        client.sock.settimeout(TIMEOUT_S if has_shown_it else 0.5)
        assert is_sent_away(client.sock) == has_shown_it
    port.stop(0).wait()


def test_a_socket_has_its_mode_from_the_settings_and_new_files_theirs_as_before(
    servicer: Servicer, tmp_path: Path
) -> None:
    port = make_port(servicer, socket_mode="0621")
    umask = os.umask(0o022)
    try:
        assert port.listen(f"unix:{tmp_path}/calls") == f"unix:{tmp_path}/calls"
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "calls").stat().st_mode) == 0o621
    port.start()
    assert ask(f"unix:{tmp_path}/calls", SERVER_INFO_PATH)
    port.stop(0).wait()


def test_no_other_user_can_connect_to_a_socket_before_it_has_its_mode(
    port: GrpcioPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    monkeypatch.setattr(Path, "chmod", lambda path, mode: modes.append(stat.S_IMODE(path.stat().st_mode)))
    port.listen(f"unix:{tmp_path}/calls")
    assert modes == [0o600]


def test_an_address_that_is_taken_is_named(port: GrpcioPort, servicer: Servicer, tmp_path: Path) -> None:
    addresses = [port.listen("127.0.0.1:0"), port.listen(f"unix:{tmp_path}/calls")]
    port.start()
    second = make_port(servicer)
    for address in addresses:
        with pytest.raises(ListenError, match=f"cannot listen on {address}: "):
            second.listen(address)
    second.stop(0).wait()
    assert all(ask(address, SERVER_INFO_PATH) for address in addresses)


def test_it_is_alive_until_the_thread_ends_that_begins_its_calls(servicer: Servicer, tmp_path: Path) -> None:
    port = make_port(servicer)
    assert port.is_alive
    port.listen(f"unix:{tmp_path}/calls")
    port.start()
    assert port.is_alive
    assert port._thread is not None
    port.stop(0).wait()
    port._thread.join(TIMEOUT_S)
    assert not port.is_alive


def test_it_ends_the_threads_that_look_for_revoked_tokens_and_at_connections(port: GrpcioPort) -> None:
    port.stop(0).wait()
    assert port._limiter._closing.is_set()
    assert port._throttle._closing.is_set()


def test_a_call_of_an_unknown_method_is_counted(port: GrpcioPort, servicer: Servicer, tmp_path: Path) -> None:
    address = port.listen(f"unix:{tmp_path}/calls")
    port.start()
    assert code_of(address, "/no/method") is grpc.StatusCode.UNIMPLEMENTED
    assert servicer.observer.metrics.status()["refused_calls"]["UNIMPLEMENTED"] == 1
    ask(address, SERVER_INFO_PATH)
    assert servicer.observer.metrics.status()["refused_calls"]["UNIMPLEMENTED"] == 1


@pytest.mark.parametrize("is_on", [False, True])
def test_reflection_and_channelz_are_served_where_the_settings_say_so(
    servicer: Servicer, tmp_path: Path, is_on: bool
) -> None:
    port = make_port(servicer, reflection=is_on, channelz=is_on)
    address = port.listen(f"unix:{tmp_path}/calls")
    port.start()
    if is_on:
        assert services_in(*ask(address, REFLECTION_PATH, LIST)) == set(REFLECTED)
        assert ask(address, CHANNELZ_PATH)
    else:
        paths = (REFLECTION_PATH, CHANNELZ_PATH)
        assert [code_of(address, path) for path in paths] == [grpc.StatusCode.UNIMPLEMENTED] * 2
    port.stop(0).wait()


def test_the_http2_port_answers_the_same_calls(servicer: Servicer) -> None:
    serving = Health(("", "known"))
    serving.update(lambda: True)
    calls = other_calls(servicer, serving, has_reflection=True)
    assert calls[SERVER_INFO_PATH](b"") == servicer.info.response()
    for service in ("", "known"):
        answer = calls[CHECK_PATH](health_pb2.HealthCheckRequest(service=service).SerializeToString())
        assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING
    assert services_in(calls[REFLECTION_PATH](LIST)) == set(REFLECTED)
    assert other_calls(servicer, serving, has_reflection=False).keys() == {SERVER_INFO_PATH, CHECK_PATH}


def test_what_is_wrong_with_such_a_call_is_told(servicer: Servicer) -> None:
    calls = other_calls(servicer, Health(("",)), has_reflection=True)
    for path in (CHECK_PATH, REFLECTION_PATH):
        with pytest.raises(DecodeError):
            calls[path](b"\xff")
    with pytest.raises(RpcError, match="there is no service 'unknown'") as refused:
        calls[CHECK_PATH](health_pb2.HealthCheckRequest(service="unknown").SerializeToString())
    assert refused.value.code == grpc.StatusCode.NOT_FOUND.value[0]
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.Service").SerializeToString()
    answer = reflection_pb2.ServerReflectionResponse.FromString(calls[REFLECTION_PATH](asked))
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
