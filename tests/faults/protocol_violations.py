"""Requests with wrong sizes, shapes and lengths, and bytes that violate HTTP/2."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import grpc
from tests.raw_http2 import PREFACE, TIMEOUT_S, data, headers, path_of, prefixed, request

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode

REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
INCOMPLETE = {"no chunks", "one chunk too few", "half a chunk too few"}
"""Messages after which the server waits, on grpcio's port for 3 s, to tell a short upload from a client that has gone.

It counts that wait as upload. On a busy machine it therefore exceeds the test server's ``--transfer-timeout``, which is
also 3 s, and the call is ended as one that takes too long: CANCELLED.
"""
Unary = pb.FusedBatchNormGradV2Request
_NBYTES = 2**12


def refusal(address: str, *messages: Unary | pb.ExchangeRequest | bytes) -> grpc.StatusCode | None:
    """Returns the error status of a call; None if it succeeds."""
    is_unary = isinstance(messages[0], Unary)
    with grpc.insecure_channel(address) as channel:
        serialized = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
        try:
            if is_unary:
                call: Any = channel.unary_unary(path_of("FusedBatchNormGradV2"))
                call(serialized[0], timeout=TIMEOUT_S)
            else:
                call = channel.stream_stream(path_of("Exchange"))
                for _ in call(iter(serialized), timeout=TIMEOUT_S):
                    pass
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None


def messages() -> dict[str, list[Unary | pb.ExchangeRequest | bytes]]:
    """Returns the messages of calls that must be refused, by description."""
    valid, header = request(_NBYTES), request(_NBYTES, whole=False)
    chunk = pb.ExchangeRequest(chunk=bytes(_NBYTES))
    begun = pb.ExchangeRequest(fused_batch_norm_grad_v2=header)

    def shaped(*shape: int) -> Unary:
        changed = Unary()
        changed.CopyFrom(valid)
        for tensor in (changed.x, changed.y_backprop):
            tensor.shape[:] = shape
        return changed

    def exchanged(unary: Unary) -> pb.ExchangeRequest:
        for tensor in (unary.x, unary.y_backprop):
            tensor.data = b""
        return pb.ExchangeRequest(fused_batch_norm_grad_v2=unary)

    shapes = {
        "a product past 2^64": (2**33, 2**33, 1, 64),
        "a product that is 0 modulo 2^64": (2**58, 1, 1, 64),
        "a product past 2^63": (2**57, 1, 1, 64),
        "more than the arena": (2**34, 1, 1, 64),
        "a negative dimension": (-1, 1, 1, 64),
        "two negative dimensions": (-4, -4, 1, 64),
        "the smallest dimension": (-(2**63), 1, 1, 64),
        "fewer elements than bytes": (1, 1, 1, 64),
        "a thousand dimensions": (1,) * 1000,
        "no dimensions": (),
    }
    unaries: dict[str, list[Unary | pb.ExchangeRequest | bytes]] = {
        f"{what}, unary": [shaped(*shape)] for what, shape in shapes.items()
    }
    del shapes["fewer elements than bytes"]
    return {
        **unaries,
        **{f"{what}, exchanged": [exchanged(shaped(*shape))] for what, shape in shapes.items()},
        "a chunk first": [chunk],
        "no chunks": [begun],
        "one chunk too few": [begun, chunk],
        "half a chunk too few": [begun, chunk, pb.ExchangeRequest(chunk=bytes(_NBYTES // 2))],
        "a chunk too many": [begun, chunk, chunk, chunk],
        "a chunk too long": [begun, pb.ExchangeRequest(chunk=bytes(3 * _NBYTES))],
        "a header for a chunk": [begun, chunk, begun],
        "nothing for a header": [pb.ExchangeRequest()],
        "a chunk of garbage": [begun, b"\xff" * _NBYTES],
        "a length past the end": [b"\x0a\xff\xff\xff\xff\x0f"],
        "a field cut off": [b"\x0a"],
    }


def conversations() -> dict[str, bytes]:
    """Returns bytes that no correct HTTP/2 client sends, by description."""
    continuation = frames.frame(frames.CONTINUATION, 0, 1, b"")
    call, opening = headers("FusedBatchNormGradV2"), PREFACE + headers("FusedBatchNormGradV2")
    longest = frames.LARGEST_FRAME_SIZE
    return {
        "HTTP/1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(190),
        "zeros": bytes(2**16),
        "half a preface": PREFACE[:12],
        "no SETTINGS": frames.PREFACE + call,
        "a message of 4 GiB": opening + data(b"\0\xff\xff\xff\xff" + bytes(100)),
        "a message of 4 GiB in an exchange": PREFACE + headers("Exchange") + data(b"\0\xff\xff\xff\xff" + bytes(100)),
        "a chunk of 4 GiB": PREFACE
        + headers("Exchange")
        + data(prefixed(pb.ExchangeRequest(fused_batch_norm_grad_v2=request(_NBYTES, whole=False)).SerializeToString()))
        + data(b"\0\xff\xff\xff\xff\x22\xfa\xff\xff\xff\x0f" + bytes(100)),
        "a compressed message": opening + data(b"\1" + struct.pack(">I", 9) + bytes(9), end=True),
        "an unknown flag": opening + data(b"\7" + struct.pack(">I", 9) + bytes(9), end=True),
        "half a prefix": opening + data(b"\0\0\0", end=True),
        "a frame longer than allowed": opening + frames.frame_header(longest, frames.DATA, 0, 1) + bytes(1000),
        "a frame that is cut off": opening + frames.frame_header(2**14, frames.DATA, 0, 1) + bytes(1000),
        "padding longer than the frame": opening + frames.frame(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(8)),
        "data of a stream that is not there": PREFACE + data(bytes(100), 7),
        "headers of stream 0": PREFACE + headers("FusedBatchNormGradV2", 0),
        "headers that end nowhere": PREFACE + frames.frame(frames.HEADERS, 0, 1, b"") + continuation * 5000,
        "a mebibyte of metadata": PREFACE + headers("FusedBatchNormGradV2", 1, [("x-huge", "x" * 2**20)]),
        "ten thousand headers": PREFACE + headers("FusedBatchNormGradV2", 1, [("x-many", "x")] * 10_000),
        "no path": PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b""),
        "garbage for headers": PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff" * 100),
        "an unknown method": PREFACE + headers("Nothing") + data(prefixed(b""), end=True),
        "a timeout without a unit": PREFACE + headers("FusedBatchNormGradV2", 1, [("grpc-timeout", "10")]),
        "a timeout of ages": PREFACE + headers("FusedBatchNormGradV2", 1, [("grpc-timeout", "99999999H")]),
        "a content length that lies": PREFACE + headers("Exchange", 1, [("content-length", "9")]) + data(bytes(100)),
        "a window past its end": PREFACE + frames.window_update(0, 2**31 - 1) * 2,
        "a window update by 0": PREFACE + frames.window_update(0, 0),
        "a flood of SETTINGS": PREFACE + frames.settings({1: 0}) * 20_000,
        "a flood of PING": PREFACE + frames.frame(frames.PING, 0, 0, bytes(8)) * 20_000,
        "a flood of resets of one stream": opening + frames.rst_stream(1, ErrorCode.CANCEL) * 20_000,
        "a flood of empty DATA": opening + data(b"") * 20_000,
    }


def changed(said: bytes, rng: Random) -> bytes:
    """Returns a conversation with some bytes changed, dropped or repeated."""
    result = bytearray(said)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(result))
        end = min(len(result), start + rng.choice((1, 2, 9, 100)))
        choice = rng.randrange(3)
        if choice == 0:
            result[start] = rng.randrange(256)
        elif choice == 1 and len(result) > 200:
            del result[start:end]
        else:
            result[start:start] = result[start:end]
    return bytes(result)
