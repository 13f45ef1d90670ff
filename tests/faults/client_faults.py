"""Clients that stall, disconnect, open thousands of connections, and send malformed requests."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from random import Random

import grpc
from tests.faults import protocol_violations
from tests.faults.harness import Harness
from tests.faults.server import TRANSFER_TIMEOUT_S
from tests.raw_http2 import PREFACE, RawConnection, data, headers, unary_upload, upload, whole_call

from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode

_SLOW = 40
"""Slow clients at each address; grpcio's two addresses together get more than it has handlers."""
_CROWD = 1000
_DRIP_S = 0.05
_RESETS = 500
_CUT_OFF_S = 6 * (TRANSFER_TIMEOUT_S + 4.0)
"""The largest transfer, half a mebibyte, may take 4 s longer; grpcio has threads for only some at a time."""
_SMALL = 4096
_CLOSED_WINDOW = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})


def write_slowly(scene: Harness, seconds: float, rng: Random) -> None:
    """Begins many uploads and sends them byte by byte, within a frame or as separate frames."""
    frame = frames.frame_header(2**14, frames.DATA, 0, 1)

    def begin(peer: RawConnection, number: int) -> Callable[[], bool]:
        peer.send((upload() if number % 4 < 2 else unary_upload()) + (frame if number % 2 else b""))
        return lambda: peer.send(b"\0" if number % 2 else data(b"\0"))

    _drip(scene, seconds, begin)


def read_slowly(scene: Harness, seconds: float, rng: Random) -> None:
    """Makes many calls and reads their answers byte by byte, or not at all."""

    def begin(peer: RawConnection, number: int) -> Callable[[], bool]:
        peer.send(whole_call(_SMALL, _CLOSED_WINDOW))
        return lambda: peer.send(frames.window_update(1, 1)) if number % 2 else True

    _drip(scene, seconds, begin)


def _drip(scene: Harness, seconds: float, begin: Callable[[RawConnection, int], Callable[[], bool]]) -> None:
    """Lets many clients begin a call and go on byte by byte until all are cut off; others must be served."""
    addresses = [address for name, address in scene.service.addresses().items() if name != "regions"]
    with ExitStack() as stack:
        peers = [stack.enter_context(RawConnection(address)) for address in addresses for _ in range(_SLOW)]
        steps = {peer: begin(peer, number) for number, peer in enumerate(peers)}
        deadline = time.monotonic() + max(seconds, _CUT_OFF_S)
        while peers and time.monotonic() < deadline:
            time.sleep(_DRIP_S)
            peers = [peer for peer in peers if steps[peer]() and not peer.has_ended_call()]
        assert not peers, f"{len(peers)} were not cut off"
        scene.load.wait_for_answers()


def disconnect(scene: Harness, seconds: float, rng: Random) -> None:
    """Half-closes, shuts down and resets calls and connections during uploads and answers."""
    addresses = [address for name, address in scene.service.addresses().items() if name != "regions"]
    tricks = (_half_close_the_call, _stop_writing, _stop_reading, _reset_during_upload, _reset_during_answer, _flood)
    for _ in scene.rounds(seconds):
        for trick in tricks:
            with RawConnection(rng.choice(addresses)) as peer:
                trick(peer)
    scene.load.wait_for_answers()


def _half_close_the_call(peer: RawConnection) -> None:
    peer.send(upload() + data(b"", end=True))
    assert peer.is_closed_by_server()


def _stop_writing(peer: RawConnection) -> None:
    peer.send(upload())
    assert peer.is_closed_by_server()


def _stop_reading(peer: RawConnection) -> None:
    peer.send(upload())
    peer.sock.shutdown(0)
    peer.send(data(bytes(2**14)))


def _reset_during_upload(peer: RawConnection) -> None:
    peer.send(upload())
    peer.reset()


def _reset_during_answer(peer: RawConnection) -> None:
    peer.send(whole_call(_SMALL, _CLOSED_WINDOW))
    time.sleep(_DRIP_S)
    peer.reset()


def _flood(peer: RawConnection) -> None:
    """Opens calls and resets them at once."""
    calls = (
        headers("FusedBatchNormGradV2", stream) + frames.rst_stream(stream, ErrorCode.CANCEL)
        for stream in range(1, 2 * _RESETS, 2)
    )
    peer.send(PREFACE + b"".join(calls))
    assert peer.is_closed_by_server()


def open_many_connections(scene: Harness, seconds: float, rng: Random) -> None:
    """Opens a thousand connections to each address, and sends nothing or part of a handshake on them."""
    addresses = scene.service.addresses()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    greetings = [b"", PREFACE[:12], PREFACE, PREFACE + headers("FusedBatchNormGradV2"), None]
    try:
        with ExitStack() as stack:
            for address in addresses.values():
                for number in range(_CROWD):
                    with suppress(OSError):  # the server may refuse more of them
                        greeting = greetings[number % len(greetings)]
                        peer = stack.enter_context(RawConnection(address))
                        if greeting is None:
                            peer.sock.close()
                        else:
                            peer.send(greeting)
            for _ in scene.rounds(seconds):
                scene.load.wait_for_answers()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def send_malformed_requests(scene: Harness, seconds: float, rng: Random) -> None:
    """Sends every malformed request, and then valid calls with bytes changed, dropped and repeated."""
    addresses = scene.service.addresses()
    regions = addresses.pop("regions", None)
    with ThreadPoolExecutor() as threads:
        list(threads.map(_violate, addresses.values()))
    for _ in scene.rounds(seconds):
        said = protocol_violations.changed(rng.choice([upload(), whole_call(_SMALL)]), rng)
        _must_end(rng.choice(list(addresses.values())), said, said.hex())
    for size in (0, 1, 2**63, 2**64 - 1) if regions is not None else ():
        assert regions is not None
        _must_end(regions, struct.pack("<Q", size), f"a lease of {size} bytes")
    scene.load.wait_for_answers()


def _violate(address: str) -> None:
    for what, messages in protocol_violations.messages().items():
        code = protocol_violations.refusal(address, *messages)
        is_too_slow = what in protocol_violations.INCOMPLETE and code is grpc.StatusCode.CANCELLED
        assert code in protocol_violations.REFUSALS or is_too_slow, f"{what} by {address}: {code}"
    for what, said in protocol_violations.conversations().items():
        _must_end(address, said, f"{what} by {address}")


def _must_end(address: str, said: bytes, what: str) -> None:
    with RawConnection(address) as peer:
        peer.send(said)
        assert peer.is_closed_by_server(), what
