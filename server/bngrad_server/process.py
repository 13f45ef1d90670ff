"""A worker process as the front process sees it."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bngrad_kernels.spec import Spec
from bngrad_server.arena import Arena
from bngrad_server.crew import Part, WorkerDiedError
from bngrad_server.worker import MAX_PACKET_NBYTES, OK, Message

_EXIT_TIMEOUT_S = 5.0
_MAX_SPECS = 4096
"""What a worker remembers; beyond, numbers are used again."""
_BATCH_TIMEOUT_S = 30.0
_SLOWEST_BYTES_PER_S = 20_000_000


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """Memory beside the arena that workers map: its file descriptor and its size in bytes."""

    fd: int
    nbytes: int


class WorkerProcess:
    """One worker process and the sockets to it: one for batches and their answers, one for its signs of life.

    Attributes:
        busy_s: For how long it has computed, in seconds.
    """

    def __init__(self, device: str, threads: int, arena: Arena, pinned_bytes: int, beat_s: float) -> None:
        """Starts it.

        Args:
            device: What it computes on.
            threads: How many threads of the CPU it uses.
            arena: What it reads and writes.
            pinned_bytes: How much memory it may page-lock, on a GPU.
            beat_s: How often it gives a sign of life, in seconds.
        """
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not before: whoever leads the worker may be about to wait for its answer.
        weakref.finalize(self, self._socket.close)
        self._life, child_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_socket, child_life:
            fds = (child_socket.fileno(), child_life.fileno(), arena.fd)
            arguments = [device, threads, beat_s, *fds, arena.nbytes, pinned_bytes, os.getpid()]
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "bngrad_server.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=fds,
                # Threads that spin for their next kernel would take the cores from the front process.
                env={"OMP_WAIT_POLICY": "passive", **os.environ},
            )
        self._spec_numbers: dict[Spec, int] = {}
        self._late_at: float | None = None
        self._began_at = 0.0
        self.busy_s = 0.0

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
        return self._late_at is not None and time.monotonic() > self._late_at

    def begin(self, parts: Sequence[Part]) -> None:
        """See `bngrad_server.crew.Worker`."""
        tasks = [job.task.pack(self._spec_number(job.spec), channels) for job, channels in parts]
        nbytes = sum(job.nbytes for job, _ in parts)
        self._began_at = time.monotonic()
        self._late_at = self._began_at + _BATCH_TIMEOUT_S + nbytes / _SLOWEST_BYTES_PER_S
        self._send(Message.RUN + b"".join(tasks))

    def fileno(self) -> int:
        """See `bngrad_server.crew.Worker`."""
        return self._socket.fileno()

    def finish(self) -> list[str | None] | None:
        """See `bngrad_server.crew.Worker`."""
        answer = self._receive()
        self._late_at = None
        self.busy_s += time.monotonic() - self._began_at
        return None if answer == OK else _failures(answer)

    def map(self, number: int, region: MappedRegion) -> None:
        """Has it map a region, before it sees any later batch."""
        self._send(Message.MAP + pickle.dumps((number, region.nbytes)), region.fd)

    def unmap(self, number: int) -> None:
        """Has it give up a region, after all earlier batches."""
        self._send(Message.UNMAP + pickle.dumps(number))

    def kill(self) -> None:
        """Ends the process at once; also one that is stopped."""
        self._process.kill()

    def hang_up(self) -> None:
        """Ends the talk: that is its signal to end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> str:
        """Ends the process, by force should it not end in time, and says how it ended."""
        self.hang_up()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._life.close()
        code = self._process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

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
            raise WorkerDiedError(f"hung up: {error}") from error

    def _receive(self) -> bytes:
        try:
            packet = self._socket.recv(MAX_PACKET_NBYTES)
        except OSError as error:
            raise WorkerDiedError(f"hung up: {error}") from error
        if not packet:
            raise WorkerDiedError("hung up")
        return packet


def _failures(answer: bytes) -> list[str | None]:
    failures: list[str | None] = pickle.loads(answer)  # noqa: S301 - from our own worker
    return failures
