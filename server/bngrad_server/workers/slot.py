"""A seat of a worker process as the front process sees it: it computes one batch at a time."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import select
import socket
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from bngrad_kernels.spec import Spec
from bngrad_server.errors import WorkerDiedError
from bngrad_server.scheduling.batch import Part
from bngrad_server.workers.main import MAX_FDS, MAX_PACKET_NBYTES, OK, Message

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


class WorkerSlot:
    """A socket, at whose other end a thread of the process computes what it is sent; see `Run`.

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
        self._room = select.poll()
        self._room.register(self._socket, select.POLLOUT)
        self._busy_time = busy_time
        self._taken = threading.Lock()
        self._late_at: float | None = None
        self._spec_numbers: dict[Spec, int] = {}
        self._mutex = threading.Lock()  # guards what follows
        self._is_busy = False
        self._changes: dict[int, MappedRegion | None] = {}
        """The regions that came, or went, of which it has not been told yet."""

    def take(self) -> bool:
        """Takes it, until `finish`, unless it was taken."""
        return self._taken.acquire(blocking=False)

    @property
    def is_late(self) -> bool:
        """Whether it takes longer over a batch than any batch takes."""
        late_at = self._late_at
        return late_at is not None and time.monotonic() > late_at

    def begin(self, parts: Sequence[Part]) -> None:
        """See `bngrad_server.scheduling.batch.Worker`."""
        if len(self._spec_numbers) + len(parts) > _MAX_SPECS:
            self._spec_numbers.clear()  # not amid a batch: its tasks name specs by their numbers
        tasks = [job.task.pack(self._spec_number(job.spec), channels) for job, channels in parts]
        nbytes = sum(job.nbytes for job, _ in parts)
        self._busy_time.begin()
        self._late_at = time.monotonic() + _BATCH_TIMEOUT_S + nbytes / _SLOWEST_BYTES_PER_S
        while not self._turn_busy():
            self._room.poll()
        self._send(Message.RUN + b"".join(tasks))

    def fileno(self) -> int:
        """See `bngrad_server.scheduling.batch.Run`."""
        return self._socket.fileno()

    def finish(self) -> list[str | None] | None:
        """See `bngrad_server.scheduling.batch.Run`."""
        answer = self._receive()
        self._late_at = None
        self._busy_time.end()
        with self._mutex, contextlib.suppress(WorkerDiedError):  # the batch is computed: the next one will see
            self._is_busy = False
            self._tell_changes()
        self._taken.release()
        return None if answer == OK else _failures(answer)

    def map(self, number: int, region: MappedRegion) -> None:
        """Tells it of a region, before any later batch."""
        self._change(number, region)

    def unmap(self, number: int) -> None:
        """Tells it to forget a region, after all earlier batches."""
        self._change(number, None)

    def catch_up(self) -> None:
        """Tells it of regions for which its socket had no room; to be called now and then."""
        with self._mutex:
            if not self._is_busy:
                self._tell_changes()

    def hang_up(self) -> None:
        """Sends nothing more: once it has answered, it ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _turn_busy(self) -> bool:
        """Keeps what changes from now on until it is free; False where its socket had no room for what was before."""
        with self._mutex:
            self._is_busy = self._tell_changes()
            return self._is_busy

    def _change(self, number: int, region: MappedRegion | None) -> None:
        """Tells it at once, or after its batch: of one that ends, a batch sent last shows whether it was read."""
        with self._mutex:
            if region is None and self._changes.get(number) is not None:
                del self._changes[number]
                return
            self._changes[number] = region
            if not self._is_busy:
                self._tell_changes()

    def _tell_changes(self) -> bool:
        """Says whether its socket had room for all: only who begins a batch may wait for a worker that reads none."""
        while self._changes:
            told = dict(itertools.islice(self._changes.items(), MAX_FDS))
            sizes = [(number, None if region is None else region.nbytes) for number, region in told.items()]
            fds = [region.fd for region in told.values() if region is not None]
            try:
                self._send(Message.REGIONS + pickle.dumps(sizes), fds, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            for number in told:
                del self._changes[number]
        return True

    def _spec_number(self, spec: Spec) -> int:
        number = self._spec_numbers.get(spec)
        if number is None:
            number = self._spec_numbers[spec] = len(self._spec_numbers)
            self._send(Message.SPEC + pickle.dumps((number, spec)))
        return number

    def _send(self, packet: bytes, fds: Sequence[int] = (), flags: int = 0) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([packet], rights, flags)  # send_fds passes no flags on
        except BlockingIOError:
            raise
        except OSError as error:
            raise WorkerDiedError(f"hung up: {error}", saw_batch=False) from error

    def _receive(self) -> bytes:
        try:
            packet = self._socket.recv(MAX_PACKET_NBYTES)
        except ConnectionResetError as error:  # it hung up before it had read all that it was sent
            raise WorkerDiedError(f"hung up: {error}", saw_batch=False) from error
        except OSError as error:
            raise WorkerDiedError(f"hung up: {error}") from error
        if not packet:
            raise WorkerDiedError("hung up")
        return packet


def _failures(answer: bytes) -> list[str | None]:
    failures: list[str | None] = pickle.loads(answer)  # noqa: S301 - from our own worker
    return failures
