"""A seat of a worker process as the front process sees it: it computes one batch at a time."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from bngrad_kernels.spec import Spec
from bngrad_server.crew import Part, WorkerDiedError
from bngrad_server.worker import MAX_PACKET_NBYTES, OK, Message

_MAX_SPECS = 4096
"""What a seat remembers; beyond, numbers are used again."""
_BATCH_TIMEOUT_S = 30.0
_SLOWEST_BYTES_PER_S = 20_000_000


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """Memory beside the arena that workers map: its file descriptor and its size in bytes."""

    fd: int
    nbytes: int


class BusyTime:
    """For how long at least one of several seats was busy.

    Attributes:
        total_s: That, in seconds, up to when all of them were last free.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._busy = 0
        self._since = 0.0
        self._mutex = threading.Lock()

    def begin(self) -> None:
        """Notes that one more is busy."""
        with self._mutex:
            if self._busy == 0:
                self._since = time.monotonic()
            self._busy += 1

    def end(self) -> None:
        """Notes that one is free again."""
        with self._mutex:
            self._busy -= 1
            if self._busy == 0:
                self.total_s += time.monotonic() - self._since


class Seat:
    """A socket, at whose other end a thread of the process computes what it is sent; see `bngrad_server.crew.Run`.

    Attributes:
        theirs: That other end.
    """

    def __init__(self, busy_time: BusyTime) -> None:
        """Is free.

        Args:
            busy_time: What it shares with the other seats of the process.
        """
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not before: whoever leads the worker may be about to wait for its answer.
        weakref.finalize(self, self._socket.close)
        self._busy_time = busy_time
        self._taken = threading.Lock()
        self._late_at: float | None = None
        self._heard_more = False  # than the batch
        self._spec_numbers: dict[Spec, int] = {}

    def take(self) -> bool:
        """Takes it, until `finish`, unless it was taken."""
        return self._taken.acquire(blocking=False)

    @property
    def is_late(self) -> bool:
        """Whether it takes longer over a batch than any batch takes."""
        late_at = self._late_at
        return late_at is not None and time.monotonic() > late_at

    def begin(self, parts: Sequence[Part]) -> None:
        """See `bngrad_server.crew.Worker`."""
        tasks = [job.task.pack(self._spec_number(job.spec), channels) for job, channels in parts]
        nbytes = sum(job.nbytes for job, _ in parts)
        self._busy_time.begin()
        self._late_at = time.monotonic() + _BATCH_TIMEOUT_S + nbytes / _SLOWEST_BYTES_PER_S
        self._heard_more = False
        self._send(Message.RUN + b"".join(tasks))

    def fileno(self) -> int:
        """See `bngrad_server.crew.Run`."""
        return self._socket.fileno()

    def finish(self) -> list[str | None] | None:
        """See `bngrad_server.crew.Run`."""
        answer = self._receive()
        self._late_at = None
        self._busy_time.end()
        self._taken.release()
        return None if answer == OK else _failures(answer)

    def map(self, number: int, region: MappedRegion) -> None:
        """Tells it of a region, before any later batch."""
        self._heard_more = True
        self._send(Message.MAP + pickle.dumps((number, region.nbytes)), region.fd)

    def unmap(self, number: int) -> None:
        """Tells it to forget a region, after all earlier batches."""
        self._heard_more = True
        self._send(Message.UNMAP + pickle.dumps(number))

    def hang_up(self) -> None:
        """Ends the talk."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _spec_number(self, spec: Spec) -> int:
        number = self._spec_numbers.get(spec)
        if number is None:
            if len(self._spec_numbers) >= _MAX_SPECS:
                self._spec_numbers.clear()
            number = self._spec_numbers[spec] = len(self._spec_numbers)
            self._send(Message.SPEC + pickle.dumps((number, spec)))
        return number

    def _send(self, packet: bytes, *fds: int) -> None:
        try:
            socket.send_fds(self._socket, [packet], fds) if fds else self._socket.send(packet)
        except OSError as error:
            raise WorkerDiedError(f"hung up: {error}", saw_batch=False) from error

    def _receive(self) -> bytes:
        try:
            packet = self._socket.recv(MAX_PACKET_NBYTES)
        except ConnectionResetError as error:  # it hung up before it had read all that it was sent
            raise WorkerDiedError(f"hung up: {error}", saw_batch=self._heard_more) from error
        except OSError as error:
            raise WorkerDiedError(f"hung up: {error}") from error
        if not packet:
            raise WorkerDiedError("hung up")
        return packet


def _failures(answer: bytes) -> list[str | None]:
    failures: list[str | None] = pickle.loads(answer)  # noqa: S301 - from our own worker
    return failures
