"""A client that never stops sending does not block others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest
from tests.raw_http2 import PREFACE, RawConnection, data, headers, path_of, prefixed, request
from tests.servers import ONE_WORKER, TIMEOUT_S, targets_of

from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import frames

OP = "FusedBatchNormGradV2"
MESSAGE = request(4096).SerializeToString()
BEGUN = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(4096, whole=False)).SerializeToString()
CHUNK = pb.ExchangeRequest(chunk=bytes(4096)).SerializeToString()
CREDIT = frames.window_update(0, 1) * 2**13
ROUNDS = 5


def unknown_media_type() -> bytes:
    return headers("Exchange").replace(b"application/grpc", b"application/json")


def whole_but_not_ended() -> bytes:
    return headers(OP) + data(prefixed(MESSAGE))


def exchange() -> bytes:
    return headers("Exchange") + b"".join(data(prefixed(message)) for message in (BEGUN, CHUNK, CHUNK))


@pytest.mark.parametrize("call", [unknown_media_type, whole_but_not_ended, exchange])
def test_others_are_served_while_a_client_never_stops_sending(call: Callable[[], bytes]) -> None:
    """The check for a disconnect must not read for as long as there is data."""
    with EmbeddedServer(options=(*ONE_WORKER, "--drain-timeout", "1")) as server:
        targets = targets_of(server.target)
        is_over = threading.Event()

        def flood(peer: RawConnection) -> None:
            peer.send(PREFACE + call())
            while not is_over.is_set() and peer.send(CREDIT):
                pass

        with RawConnection(targets["tcp"]) as peer:
            flooder = threading.Thread(target=flood, args=(peer,))
            flooder.start()
            try:
                for target in [*targets.values()] * ROUNDS:
                    with grpc.insecure_channel(target) as channel:
                        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path_of(OP))
                        method(MESSAGE, timeout=TIMEOUT_S)
                assert server.stop() == 0
            finally:
                is_over.set()
                server.process.kill()
                flooder.join()
        assert "Traceback" not in server.stderr()
