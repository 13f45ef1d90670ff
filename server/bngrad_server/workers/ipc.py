"""What the front process and a worker send each other: the kinds of packets, and what is in them.

Every message is one packet. On the sockets of its slots, the front process sends packets whose first byte is a
`Message`; the worker answers only RUN. On the socket of its heartbeat, the worker sends packets whose first byte is a
`Report`, and the front process sends nothing. On the last socket, it sends a GPU's worker `AheadChange`s.
"""

from __future__ import annotations

import enum
import itertools
import pickle
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bngrad_kernels.problem import PROBLEM_TYPES, AnyProblem, Array, problem_type
from bngrad_kernels.spec import Spec
from bngrad_server.memory.layout import ARENA, Task, aligned

MAX_PACKET_NBYTES = 128 * 1024
MAX_FDS = 250
"""Linux takes at most 253 descriptors with a packet."""


class Message(bytes, enum.Enum):
    """The kinds of packets from the front process."""

    SPEC = b"S"
    """A pickled pair: the number by which tasks name a spec, the spec."""
    REGIONS = b"M"
    """Pickled `RegionChange`s, with the file descriptors of the regions to map, at most MAX_FDS."""
    RUN = b"R"
    """Packed tasks; the answer is OK, or else pickled failures: a string or None for each task."""


class Report(bytes, enum.Enum):
    """The kinds of packets by which a worker shows that it is alive."""

    READY = b"R"
    """It takes batches; a pickled pair follows: the device's description, and the size of its own memory."""
    HEARTBEAT = b"."
    """How much of the device's own memory is taken follows, as text."""
    FAILED = b"F"
    """Its device cannot be used, and it ends; a sentence follows that says why."""


OK = b"K"
"""The answer to a batch without failures."""

RegionChange: TypeAlias = tuple[int, int | None]
"""The number of a region, and its size in bytes where the worker is to map it, None where it is to unmap it."""


class AheadChange(NamedTuple):
    """A tensor that a GPU's worker is to copy to the GPU ahead of its request, or whose copy is to go.

    Attributes:
        number: The tensor's number, which no other tensor ever has.
        memory: The number of the mapped memory where it lies.
        offset: Where it begins there.
        nbytes: Its size; 0 if its copy is to go.
    """

    number: int
    memory: int = ARENA
    offset: int = 0
    nbytes: int = 0

    def packed(self) -> bytes:
        """The packet."""
        return _AHEAD_CHANGE.pack(*self)

    @classmethod
    def unpacked(cls, packet: bytes) -> AheadChange:
        """The change in a packet."""
        return cls(*_AHEAD_CHANGE.unpack(packet))


_AHEAD_CHANGE = struct.Struct("<4q")
_NO_COPIES: Mapping[int, Any] = MappingProxyType({})
_SPEC_NUMBER = struct.Struct("<I")
_LARGE = {order: problem.large_inputs + problem.large_outputs for order, problem in PROBLEM_TYPES.items()}
_FORMATS = {len(names): struct.Struct(f"<I?q{3 * len(names)}q2q") for names in _LARGE.values()}
"""Packed tasks, by the number of their tensors of the shape of x."""


class PacketReceiver:
    """Receives packets into memory of its own, so that a process without memory does not lose a sound worker."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(MAX_PACKET_NBYTES))

    def receive(self, sock: socket.socket) -> bytes:
        """Receives a packet, for one thread at a time; empty once the other end is closed.

        Raises:
            OSError: See `socket.socket.recv`.
        """
        return bytes(self._buffer[: sock.recv_into(self._buffer)])


def pickled(content: Any, kind: bytes = b"") -> bytes:
    """A packet of a kind with pickled content."""
    return kind + pickle.dumps(content)


def unpickled(content: bytes | memoryview) -> Any:
    """The content of a packet, without the byte that says its kind."""
    return pickle.loads(content)  # noqa: S301 - both ends are our own


def pack_task(task: Task, spec_number: int, channels: range) -> bytes:
    """Packs a task, with the number by which the worker knows its spec, and the channels to compute."""
    has_scale, stats_offset, places = task
    numbers = itertools.chain.from_iterable(places)
    pack = _FORMATS[len(places)].pack
    return pack(spec_number, has_scale, stats_offset, *numbers, channels.start, channels.stop)


def split_batch(packed: memoryview, specs: Mapping[int, Spec]) -> list[bytes]:
    """The packed tasks of a batch, which are all of one order."""
    (spec_number,) = _SPEC_NUMBER.unpack_from(packed)
    nbytes = _FORMATS[len(_LARGE[specs[spec_number].order])].size
    return [bytes(packed[start : start + nbytes]) for start in range(0, len(packed), nbytes)]


def unpack_problem(
    packed: bytes, specs: Mapping[int, Spec], memories: Mapping[int, memoryview], copies: Mapping[int, Any] = _NO_COPIES
) -> AnyProblem:
    """The problem of a packed task; its arrays are views of shared memory.

    Args:
        packed: The task.
        specs: The specs by their numbers.
        memories: The mapped memory, likewise.
        copies: The copies of tensors that the GPU has already, likewise.
    """
    spec = specs[_SPEC_NUMBER.unpack_from(packed)[0]]
    problem, large = problem_type(spec), _LARGE[spec.order]
    _, has_scale, stats_offset, *places, first, last = _FORMATS[len(large)].unpack(packed)
    stride = aligned(spec.stats_nbytes)
    arrays: dict[str, Array | None] = {}
    on_device = {}
    for i, name in enumerate(large):
        memory, offset, ahead = places[3 * i : 3 * i + 3]
        arrays[name] = _view(memories[memory], offset, spec.shape, spec.dtype)
        if ahead and (copy := copies.get(ahead)) is not None:
            on_device[name] = copy
    for i, name in enumerate(problem.small_inputs + problem.small_outputs):
        offset = stats_offset + i * stride
        arrays[name] = _view(memories[ARENA], offset, (spec.channels,), spec.stats_dtype)
    if not has_scale:
        arrays["scale"] = None
    channels = None if last - first == spec.channels else range(first, last)
    return problem(spec, **arrays, channels=channels, on_device=on_device)  # type: ignore[arg-type]


def _view(buffer: memoryview, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.ndarray(shape, dtype, buffer, offset)
