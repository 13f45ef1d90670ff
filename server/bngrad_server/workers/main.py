"""The worker process: owns one device, and computes what it is sent.

Run as ``python -m bngrad_server.workers.main DEVICE THREADS BEAT_S LIFE_FD ARENA_FD ARENA_NBYTES PINNED_NBYTES
FRONT_PID SEAT_FD...``. Every BEAT_S seconds it gives a sign of life, one of them being that its kernels are compiled.
It ends with the front process, and when its device fails. Every message is one
packet; its first byte says what it is: `Message`.

Each seat is a socket and a thread, which computes one batch at a time. On a GPU the batches of several seats overlap.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator

from bngrad_kernels import backends
from bngrad_kernels.backend import Backend
from bngrad_kernels.errors import DeviceFailedError, DeviceUnavailableError
from bngrad_kernels.problem import AnyProblem
from bngrad_kernels.spec import Spec
from bngrad_server.memory.arena import map_arena
from bngrad_server.runtime.processes import die_with_parent, ignore_stop_signals
from bngrad_server.telemetry import logs
from bngrad_server.workers.ipc import split_batch, unpack_problem
from bngrad_server.workers.pinned_memory import PinnedMemory

logger = logging.getLogger(__name__)

MAX_PACKET_NBYTES = 128 * 1024
MAX_FDS = 250
"""The system takes three more with a packet."""
_MAX_KNOWN = 1024


class Message(bytes, enum.Enum):
    """The kinds of packets from the front process; only RUN is answered."""

    SPEC = b"S"
    """A pickled pair: the number by which tasks name a spec, the spec."""
    REGIONS = b"M"
    """Pickled pairs: the number by which tasks name a region, its size in bytes, or None where it is to be given up;
    with the file descriptors of the others, at most MAX_FDS."""
    RUN = b"R"
    """Packed tasks; answered by pickled failures, one a task, or by nothing but OK."""


READY = b"R"
"""The sign of life that says that batches are taken; a pickled pair follows: the device's description, and the size of
its own memory."""
FAILED = b"F"
"""The last sign of life of a process whose device cannot be used; a sentence follows that says why."""
BEAT = b"."
"""The other signs of life; how much of the device's own memory is taken follows, as text."""
OK = b"K"
"""The answer to a batch without failures."""


def main() -> None:
    """Serves the front process until the socket closes."""
    device, threads, beat_s, *numbers = sys.argv[1:]
    life_fd, arena_fd, arena_nbytes, pinned_nbytes, front_pid, *slot_fds = map(int, numbers)
    die_with_parent(front_pid)
    ignore_stop_signals()
    logs.set_up_as_parent()
    life = socket.socket(fileno=life_fd)
    running: list[Backend] = []
    threading.Thread(target=_beat, args=(life, float(beat_s), running), name="beat", daemon=True).start()
    fronts = [socket.socket(fileno=fd) for fd in slot_fds]
    arena = map_arena(arena_fd, arena_nbytes)
    # Numba would import it, for what no kernel here uses: a quarter of what a start costs.
    sys.modules["scipy"] = None  # type: ignore[assignment]
    with _ending_process(life, device):
        backend = backends.create(device, threads=int(threads))
        backend.warm_up()
        running.append(backend)
        memories = PinnedMemory(arena, backend, pinned_nbytes)
        life.send(READY + pickle.dumps((backend.description, backend.memory_nbytes)))
        first, *others = (_SlotLoop(front, backend, memories) for front in fronts)
        for slot in others:
            threading.Thread(target=_serve, args=(slot, life, device), name="seat").start()
        first.serve()


def _serve(slot: _SlotLoop, life: socket.socket, device: str) -> None:
    with _ending_process(life, device):
        slot.serve()


@contextlib.contextmanager
def _ending_process(life: socket.socket, device: str) -> Iterator[None]:
    """Ends the whole process where one of its threads cannot go on, unless it is that the front process has ended."""
    try:
        yield
    except ConnectionError:
        return
    except (DeviceUnavailableError, DeviceFailedError) as error:
        logger.error("%s: %s", device, error)
        with contextlib.suppress(ConnectionError):
            life.send(FAILED + str(error).encode()[: MAX_PACKET_NBYTES - 1])
        logging.shutdown()
        os._exit(1)  # what a device that has failed would do at a normal exit, nobody knows
    except BaseException:
        logger.exception("%s: a thread failed as none should", device)
        logging.shutdown()
        os._exit(1)  # at a normal exit, the other seats' threads would be waited for


def _beat(life: socket.socket, beat_s: float, running: list[Backend]) -> None:
    """Gives signs of life; there is no back end yet while it is made."""
    with contextlib.suppress(ConnectionError):
        while True:
            life.send(BEAT + b"%d" % sum(backend.used_nbytes for backend in running))
            time.sleep(beat_s)


class _SlotLoop:
    """The loop over packets."""

    def __init__(self, front: socket.socket, backend: Backend, memories: PinnedMemory) -> None:
        self._front = front
        self._backend = backend
        self._memories = memories
        self._specs: dict[int, Spec] = {}
        self._known: dict[bytes, AnyProblem] = {}

    def serve(self) -> None:
        while True:
            packet, fds, _, _ = socket.recv_fds(self._front, MAX_PACKET_NBYTES, MAX_FDS)
            if not packet:
                return
            kind, content = packet[:1], memoryview(packet)[1:]
            if kind == Message.RUN:
                self._front.send(self._answer(content))
            elif kind == Message.SPEC:
                self._known.clear()
                number, self._specs[number] = pickle.loads(content)  # noqa: S301 - from the front process
            else:
                self._change_regions(pickle.loads(content), fds)  # noqa: S301

    def _change_regions(self, changes: list[tuple[int, int | None]], fds: list[int]) -> None:
        self._known.clear()  # its problems would keep the memory
        for number, nbytes in changes:
            if nbytes is None:
                self._memories.remove(number)
            else:
                fd = fds.pop(0)
                self._memories.add(number, map_arena(fd, nbytes))
                os.close(fd)

    def _answer(self, packed: memoryview) -> bytes:
        failures = self._run([self._problem(task) for task in split_batch(packed, self._specs)])
        return pickle.dumps(failures) if any(failures) else OK

    def _problem(self, packed: bytes) -> AnyProblem:
        """The problem of a task; small ones come again and again at the same places."""
        problem = self._known.get(packed)
        if problem is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            problem = self._known[packed] = unpack_problem(packed, self._specs, self._memories.mapped)
        return problem

    def _run(self, problems: list[AnyProblem]) -> list[str | None]:
        """Computes problems, and says for each why it failed, or None."""
        if len(problems) > 1:
            try:
                self._backend.run(problems)
            except DeviceFailedError:
                raise
            except Exception:
                logger.exception("a batch of %d failed; running each of it alone", len(problems))
            else:
                return [None] * len(problems)
        return [self._run_alone(problem) for problem in problems]

    def _run_alone(self, problem: AnyProblem) -> str | None:
        try:
            self._backend.run([problem])
        except DeviceFailedError:
            raise
        except Exception as error:
            logger.exception("%s failed", problem.spec)
            return type(error).__name__
        return None


if __name__ == "__main__":
    main()
