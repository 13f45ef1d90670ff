"""A worker process, seen from the front process."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bngrad_kernels.child import module_command
from bngrad_server.config import ServerConfig
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.regions import Region
from bngrad_server.runtime.processes import end_process
from bngrad_server.scheduling.job import Part
from bngrad_server.workers.ipc import AheadChange, PacketReceiver
from bngrad_server.workers.worker_slot import BusyTime, WorkerSlot

_EXIT_TIMEOUT_S = 5.0


class WorkerProcess:
    """One worker process and the sockets to it: one for each of its slots, its heartbeat, and copies ahead.

    Attributes:
        slots: How many batches it computes at once.
    """

    def __init__(self, device: str, config: ServerConfig, arena: Arena, heartbeat_s: float, slots: int) -> None:
        """Starts the process; on a GPU, it may page-lock ``pinned_bytes``, and the reserve of the arena."""
        self.slots = slots
        self._busy_time = BusyTime()
        self._slots = [WorkerSlot(self._busy_time, compiles=device == "cpu") for _ in range(slots)]
        self._receiver = PacketReceiver()
        self._heartbeat, their_heartbeat = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ahead, their_ahead = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ahead.setblocking(False)
        self._copied: set[int] = set()
        with contextlib.ExitStack() as stack:
            ends = (their_heartbeat, their_ahead, *(slot.theirs for slot in self._slots))
            heartbeat_fd, ahead_fd, *slot_fds = (stack.enter_context(end).fileno() for end in ends)
            pinned_nbytes = config.pinned_bytes and config.pinned_bytes + arena.reserve_nbytes
            limits = pinned_nbytes, config.gpu_memory_bytes
            numbers = [heartbeat_fd, ahead_fd, arena.fd, arena.file_nbytes, *limits, os.getpid(), *slot_fds]
            arguments = (device, config.threads, heartbeat_s, *numbers)
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                module_command("bngrad_server.workers.main", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(heartbeat_fd, ahead_fd, arena.fd, *slot_fds),
                # Threads that spin for their next kernel would take the cores from the front process.
                env={"OMP_WAIT_POLICY": "passive", **os.environ},
            )

    def receive_report(self, timeout_s: float) -> bytes | None:
        """Receives the next `Report` packet; empty once the process has ended, None if none came in time."""
        self._heartbeat.settimeout(timeout_s)
        try:
            return self._receiver.receive(self._heartbeat)
        except TimeoutError:
            return None
        except OSError:
            return b""

    @property
    def busy_s(self) -> float:
        """For how long it has computed, in seconds."""
        return self._busy_time.total_s

    @property
    def resident_bytes(self) -> int:
        """The memory that it has in use, shared memory included; 0 once it has ended."""
        try:
            pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * mmap.PAGESIZE

    @property
    def is_late(self) -> bool:
        """Whether it takes longer over a batch than any batch takes."""
        return any(slot.is_late for slot in self._slots)

    def begin(self, parts: Sequence[Part]) -> WorkerSlot:
        """See `bngrad_server.scheduling.job.Worker`."""
        slot = next(slot for slot in self._slots if slot.take())
        slot.begin(parts)
        return slot

    def change_region(self, number: int, region: Region | None) -> None:
        """Has the worker map a region, or unmap it if None; see `WorkerSlot.change_region`."""
        for slot in self._slots:
            slot.change_region(number, region)

    def change_ahead(self, change: AheadChange) -> None:
        """Has the process copy a tensor to its GPU ahead, or drop the copy; it may do neither, where it is busy."""
        with contextlib.suppress(OSError):  # the socket is full, or the process has ended
            self._ahead.send(change.packed())
            if change.nbytes:
                self._copied.add(change.number)
                return
        self._copied.discard(change.number)

    def has_copy(self, number: int) -> bool:
        """See `bngrad_server.scheduling.job.Worker`."""
        return number in self._copied

    def flush_pending(self) -> None:
        """Sends changes of regions for which its sockets had no room; to be called now and then."""
        for slot in self._slots:
            slot.flush_pending()

    def kill(self) -> None:
        """Kills the process at once, even if it is stopped."""
        self._process.kill()

    def shut_down(self) -> None:
        """Sends nothing more, which tells the process to end."""
        for slot in self._slots:
            slot.shut_down()

    def close(self) -> str:
        """Ends the process, by force should it not end in time, and returns how it ended."""
        self.shut_down()
        code = end_process(self._process, _EXIT_TIMEOUT_S)
        self._heartbeat.close()
        self._ahead.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
