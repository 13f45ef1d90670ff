"""Options that relax authentication, and errors for unusable files."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.security.conftest import Guarded, ask

from bngrad_cli.embedded import EmbeddedServer, ServerStartError

_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def test_health_may_be_open_and_reflection_off(tmp_path: Path) -> None:
    options = ("--open-health", "--no-reflection", "--socket-mode", "0660")
    with Guarded(tmp_path, options=options).running() as guarded, guarded.channel("TCP") as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        health = health_pb2.HealthCheckResponse.FromString(check(b"", timeout=60))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        reflect: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(_REFLECTION)
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Bearer {guarded.token}"),), grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                next(reflect(iter([b""]), metadata=metadata, timeout=60))
            assert isinstance(refused.value, grpc.Call)
            assert refused.value.code() == code
        assert guarded.socket.stat().st_mode & 0o777 == 0o660
        with guarded.client(guarded.unix_target) as client:
            ask(client)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--token-file", "no-such-file"),
            "--token-file is 'no-such-file'; it should be a file that can be read: No such file",
        ),
        (
            ("--tls-certificate", "no-such-file", "--tls-key", "x"),
            "--tls-certificate is 'no-such-file'; it should be a file that can be read: No such file",
        ),
        (("--token-file", __file__), f"--token-file is {__file__!r}; line 1 of {__file__} must be NAME sha256:HASH"),
        (("--tls-certificate", __file__, "--tls-key", __file__), "are not a certificate and its key"),
    ],
)
def test_unusable_files_are_named_at_the_start(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ServerStartError) as refused:
        EmbeddedServer(options=options).__enter__()
    assert message in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_a_server_does_not_start_with_tokens_that_every_user_may_change(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch()
    path.chmod(0o666)
    with pytest.raises(ServerStartError) as refused:
        EmbeddedServer(options=("--token-file", str(path))).__enter__()
    assert f"{path} has mode 0666, so every user of this host may change it" in str(refused.value)
    assert "Traceback" not in str(refused.value)
