"""A worker process as the front process sees it."""

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

from bngrad_server.memory.arena import Arena
from bngrad_server.runtime.processes import end_process
from bngrad_server.scheduling.batch import Part
from bngrad_server.workers.main import MAX_PACKET_NBYTES
from bngrad_server.workers.slot import BusyTime, MappedRegion, WorkerSlot

_EXIT_TIMEOUT_S = 5.0


class WorkerProcess:
    """One worker process and the sockets to it: one for each of its seats, and one for its signs of life.

    Attributes:
        slots: How many batches it computes at once.
    """

    def __init__(self, device: str, threads: int, arena: Arena, pinned_bytes: int, beat_s: float, slots: int) -> None:
        """Starts it.

        Args:
            device: What it computes on.
            threads: How many threads of the CPU it uses.
            arena: What it reads and writes.
            pinned_bytes: How much memory it may page-lock, on a GPU.
            beat_s: How often it gives a sign of life, in seconds.
            slots: How many batches it computes at once.
        """
        self.slots = slots
        self._busy_time = BusyTime()
        self._slots = [WorkerSlot(self._busy_time) for _ in range(slots)]
        self._life, child_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            theirs = [stack.enter_context(child) for child in (child_life, *(slot.theirs for slot in self._slots))]
            life_fd, *slot_fds = (child.fileno() for child in theirs)
            numbers = [life_fd, arena.fd, arena.nbytes, pinned_bytes, os.getpid(), *slot_fds]
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "bngrad_server.workers.main", *map(str, (device, threads, beat_s, *numbers))],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(life_fd, arena.fd, *slot_fds),
                # Threads that spin for their next kernel would take the cores from the front process.
                env={"OMP_WAIT_POLICY": "passive", **os.environ},
            )

    def sign_of_life(self, timeout_s: float) -> bytes | None:
        """What it says next of itself; empty once it has ended, None where it said nothing in time."""
        self._life.settimeout(timeout_s)
        try:
            return self._life.recv(MAX_PACKET_NBYTES)
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
        """See `bngrad_server.scheduling.batch.Worker`."""
        slot = next(slot for slot in self._slots if slot.take())
        slot.begin(parts)
        return slot

    def map(self, number: int, region: MappedRegion) -> None:
        """Has it map a region, before it sees any later batch."""
        for slot in self._slots:
            slot.map(number, region)

    def unmap(self, number: int) -> None:
        """Has it give up a region, after all earlier batches."""
        for slot in self._slots:
            slot.unmap(number)

    def catch_up(self) -> None:
        """Tells it of regions for which its sockets had no room; to be called now and then."""
        for slot in self._slots:
            slot.catch_up()

    def kill(self) -> None:
        """Ends the process at once; also one that is stopped."""
        self._process.kill()

    def hang_up(self) -> None:
        """Ends the talk: that is its signal to end."""
        for slot in self._slots:
            slot.hang_up()

    def close(self) -> str:
        """Ends the process, by force should it not end in time, and says how it ended."""
        self.hang_up()
        code = end_process(self._process, _EXIT_TIMEOUT_S)
        self._life.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
