"""A slot of a worker process, seen from the front process: it computes one batch at a time."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

from bngrad_kernels.spec import Spec
from bngrad_server.errors import WorkerDiedError
from bngrad_server.memory.regions import Region
from bngrad_server.scheduling.job import Part
from bngrad_server.workers.ipc import MAX_FDS, OK, Message, PacketReceiver, pack_task, pickled, unpickled

_MAX_SPECS = 4096
"""How many specs have numbers at once."""
_BATCH_TIMEOUT_S = 30.0
_SLOWEST_BYTES_PER_S = 20_000_000
_COMPILE_TIMEOUT_S = 300.0
"""For how long after the first batch of a dtype and an order no batch is late: it waits for its kernel to be compiled,
or NumPy computes it."""


class BusyTime:
    """The time in which at least one of several slots was busy.

    Attributes:
        total_s: That time in seconds, up to when all of them were last free.
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
    """A socket to a thread of the worker process, which computes what it is sent; see `Run`.

    Attributes:
        theirs: The worker's end of the socket.
    """

    def __init__(self, busy_time: BusyTime, *, compiles: bool = False) -> None:
        """Makes a free slot.

        Args:
            busy_time: That of the process, which all its slots share.
            compiles: Whether kernels may have to be compiled.
        """
        self._compiles = compiles
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._socket.close)  # not before: a thread may be about to wait for an answer
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)
        self._receiver = PacketReceiver()
        self._busy_time = busy_time
        self._taken = threading.Lock()
        self._late_at: float | None = None
        self._spec_numbers: dict[Spec, int] = {}
        self._compiled_by: dict[tuple[Any, int], float] = {}
        """By dtype and order, when their kernel must be compiled."""
        self._mutex = threading.Lock()  # guards what follows
        self._is_busy = False
        self._pending: dict[int, Region | None] = {}
        """Changes that were not sent yet, by the regions' numbers: regions to map, None for those to unmap."""

    def take(self) -> bool:
        """Takes the slot until `finish`; returns False if it was taken."""
        return self._taken.acquire(blocking=False)

    @property
    def is_late(self) -> bool:
        """Whether it takes longer over a batch than any batch takes."""
        late_at = self._late_at
        return late_at is not None and time.monotonic() > late_at

    def begin(self, parts: Sequence[Part]) -> None:
        """See `bngrad_server.scheduling.job.Worker`."""
        if len(self._spec_numbers) + len(parts) > _MAX_SPECS:
            self._spec_numbers.clear()  # before the batch, whose tasks name specs by their numbers
        tasks = [pack_task(job.task, self._spec_number(job.spec), channels) for job, channels in parts]
        nbytes = sum(job.nbytes for job, _ in parts)
        self._busy_time.begin()
        now = time.monotonic()
        late_at = [now + _BATCH_TIMEOUT_S + nbytes / _SLOWEST_BYTES_PER_S]
        if self._compiles:
            kernels = {(job.spec.dtype, job.spec.order) for job, _ in parts}
            late_at += [self._compiled_by.setdefault(kernel, now + _COMPILE_TIMEOUT_S) for kernel in kernels]
        self._late_at = max(late_at)
        while not self._become_busy():
            self._writable.poll()
        self._send(Message.RUN + b"".join(tasks))

    def fileno(self) -> int:
        """See `bngrad_server.scheduling.job.Run`."""
        return self._socket.fileno()

    def finish(self) -> list[str | None] | None:
        """See `bngrad_server.scheduling.job.Run`."""
        answer = self._receive()
        self._late_at = None
        self._busy_time.end()
        with self._mutex, contextlib.suppress(WorkerDiedError):  # the batch is computed: the next one will raise
            self._is_busy = False
            self._send_pending()
        self._taken.release()
        return None if answer == OK else unpickled(answer)

    def change_region(self, number: int, region: Region | None) -> None:
        """Has the worker map a region, or unmap it if None, after all earlier batches and before any later one.

        The change is sent at once, or after the batch: what was sent last must show whether a batch was read.
        """
        with self._mutex:
            if region is None and self._pending.get(number) is not None:
                del self._pending[number]
                return
            self._pending[number] = region
            if not self._is_busy:
                self._send_pending()

    def flush_pending(self) -> None:
        """Sends changes of regions for which the socket had no room; to be called now and then."""
        with self._mutex:
            if not self._is_busy:
                self._send_pending()

    def shut_down(self) -> None:
        """Sends nothing more: the worker's thread ends once it has answered."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _become_busy(self) -> bool:
        """Holds back later changes until the batch is finished; False where there was no room for earlier ones."""
        with self._mutex:
            self._is_busy = self._send_pending()
            return self._is_busy

    def _send_pending(self) -> bool:
        """Sends pending changes without waiting, since the worker may read nothing; False if there was no room."""
        while self._pending:
            sent = dict(itertools.islice(self._pending.items(), MAX_FDS))
            changes = [(number, None if region is None else region.nbytes) for number, region in sent.items()]
            fds = [region.fd for region in sent.values() if region is not None]
            try:
                self._send(pickled(changes, Message.REGIONS), fds, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            for number in sent:
                del self._pending[number]
        return True

    def _spec_number(self, spec: Spec) -> int:
        number = self._spec_numbers.get(spec)
        if number is None:
            number = self._spec_numbers[spec] = len(self._spec_numbers)
            self._send(pickled((number, spec), Message.SPEC))
        return number

    def _send(self, packet: bytes, fds: Sequence[int] = (), flags: int = 0) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([packet], rights, flags)  # send_fds passes no flags on
        except BlockingIOError:
            raise
        except OSError as error:
            raise WorkerDiedError(f"closed its socket: {error}", saw_batch=False) from error

    def _receive(self) -> bytes:
        try:
            packet = self._receiver.receive(self._socket)
        except ConnectionResetError as error:  # it closed the socket before it had read all that it was sent
            raise WorkerDiedError(f"closed its socket: {error}", saw_batch=False) from error
        except OSError as error:
            raise WorkerDiedError(f"closed its socket: {error}") from error
        if not packet:
            raise WorkerDiedError("closed its socket")
        return packet
