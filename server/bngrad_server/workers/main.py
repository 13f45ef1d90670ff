"""The worker process: owns one device, and computes the batches that the front process sends.

Run as ``python -m bngrad_server.workers.main DEVICE THREADS HEARTBEAT_S HEARTBEAT_FD AHEAD_FD ARENA_FD ARENA_NBYTES
PINNED_NBYTES GPU_NBYTES FRONT_PID SLOT_FD...``; the messages are those of `bngrad_server.workers.ipc`. It sends a
heartbeat every HEARTBEAT_S seconds, and READY once it can compute most requests and a GPU has passed its self-test. It
ends with the front process, and when its device fails.

Each slot is a socket and a thread, which computes one batch at a time. On a GPU the batches of several slots overlap.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
from bngrad_server.runtime.processes import die_with_parent, ignore_stop_signals
from bngrad_server.telemetry import logs
from bngrad_server.workers import ipc
from bngrad_server.workers.ahead_copies import AheadCopies
from bngrad_server.workers.pinned_memory import PinnedMemory
from bngrad_wire.mapped_file import MappedFile

logger = logging.getLogger(__name__)

_MAX_CACHED_PROBLEMS = 1024


def main() -> None:
    """Serves the front process until its sockets close."""
    device, threads, heartbeat_s, *numbers = sys.argv[1:]
    heartbeat_fd, ahead_fd, arena_fd, arena_nbytes, pinned_nbytes, gpu_nbytes, front_pid, *slot_fds = map(int, numbers)
    die_with_parent(front_pid)
    ignore_stop_signals()
    logs.set_up_as_parent()
    heartbeat = socket.socket(fileno=heartbeat_fd)
    running: list[Backend] = []
    beating = (heartbeat, float(heartbeat_s), running, device)
    threading.Thread(target=_send_heartbeats, args=beating, name="heartbeat", daemon=True).start()
    sockets = [socket.socket(fileno=fd) for fd in slot_fds]
    arena = MappedFile(arena_fd, arena_nbytes).view
    with _ending_process(heartbeat, device):
        backend = backends.create(device, threads=int(threads), gpu_memory_nbytes=gpu_nbytes or None, is_eager=True)
        backend.warm_up()
        began = time.monotonic()
        if computed := backend.self_test():
            taken_s = time.monotonic() - began
            logger.info("%s passed its self-test: %d problems in %.2f s", backend.description, computed, taken_s)
        running.append(backend)
        memory = PinnedMemory(arena, backend, pinned_nbytes)
        copies = AheadCopies(memory, backend)
        heartbeat.send(ipc.pickled((backend.description, backend.memory_nbytes), ipc.Report.READY))
        if backend.memory_nbytes:
            arguments = (copies, socket.socket(fileno=ahead_fd), heartbeat, device)
            threading.Thread(target=_copy_ahead, args=arguments, name="copy-ahead", daemon=True).start()
        first, *others = (_SlotLoop(sock, backend, memory, copies) for sock in sockets)
        for loop in others:
            threading.Thread(target=_serve, args=(loop, heartbeat, device), name="slot").start()
        first.serve()


def _serve(loop: _SlotLoop, heartbeat: socket.socket, device: str) -> None:
    with _ending_process(heartbeat, device):
        loop.serve()


def _copy_ahead(copies: AheadCopies, sock: socket.socket, heartbeat: socket.socket, device: str) -> None:
    with _ending_process(heartbeat, device):
        copies.serve(sock)


@contextlib.contextmanager
def _ending_process(heartbeat: socket.socket, device: str) -> Iterator[None]:
    """Ends the whole process where one of its threads cannot go on, unless the front process has ended."""
    try:
        yield
    except ConnectionError:
        return
    except (DeviceUnavailableError, DeviceFailedError) as error:
        with contextlib.suppress(ConnectionError):
            heartbeat.send(ipc.Report.FAILED + str(error).encode()[: ipc.MAX_PACKET_NBYTES - 1])
        logging.shutdown()
        os._exit(1)  # a normal exit would call into a device that has failed
    except BaseException:
        logger.exception("%s: unexpected error in a worker's thread", device)
        logging.shutdown()
        os._exit(1)  # a normal exit would wait for the threads of the other slots


def _send_heartbeats(heartbeat: socket.socket, heartbeat_s: float, running: list[Backend], device: str) -> None:
    """Sends heartbeats until the front process ends; `running` is empty while the backend is made."""
    with _ending_process(heartbeat, device):
        while True:
            heartbeat.send(ipc.Report.HEARTBEAT + b"%d" % sum(backend.used_nbytes for backend in running))
            time.sleep(heartbeat_s)


class _SlotLoop:
    """Serves one slot: receives packets, computes batches, answers them."""

    def __init__(self, sock: socket.socket, backend: Backend, memory: PinnedMemory, copies: AheadCopies) -> None:
        self._socket = sock
        self._backend = backend
        self._memory = memory
        self._copies = copies
        self._specs: dict[int, Spec] = {}
        self._problems: dict[bytes, AnyProblem] = {}

    def serve(self) -> None:
        while True:
            packet, fds, _, _ = socket.recv_fds(self._socket, ipc.MAX_PACKET_NBYTES, ipc.MAX_FDS)
            if not packet:
                return
            kind, content = packet[:1], memoryview(packet)[1:]
            if kind == ipc.Message.RUN:
                self._socket.send(self._answer(content))
            elif kind == ipc.Message.SPEC:
                self._problems.clear()
                number, self._specs[number] = ipc.unpickled(content)
            else:
                self._change_regions(ipc.unpickled(content), fds)

    def _change_regions(self, changes: list[ipc.RegionChange], fds: list[int]) -> None:
        self._problems.clear()  # their arrays would keep the memory mapped
        for number, nbytes in changes:
            if nbytes is None:
                self._memory.remove(number)
            else:
                fd = fds.pop(0)
                self._memory.add(number, MappedFile(fd, nbytes).view)
                os.close(fd)

    def _answer(self, packed: memoryview) -> bytes:
        failures = self._run([self._problem(task) for task in ipc.split_batch(packed, self._specs)])
        return ipc.pickled(failures) if any(failures) else ipc.OK

    def _problem(self, packed: bytes) -> AnyProblem:
        """The problem of a task, from the cache: small tasks come again and again at the same places."""
        problem = self._problems.get(packed)
        if problem is None:
            if len(self._problems) >= _MAX_CACHED_PROBLEMS:
                self._problems.clear()
            copies = self._copies.by_number
            problem = ipc.unpack_problem(packed, self._specs, self._memory.mapped, copies)
            if not problem.on_device:  # else the cache would keep the device's memory
                self._problems[packed] = problem
        return problem

    def _run(self, problems: list[AnyProblem]) -> list[str | None]:
        """Computes problems, and returns for each why it failed, or None."""
        if len(problems) > 1:
            try:
                self._backend.run(problems)
            except DeviceFailedError:
                raise
            except Exception:
                logger.exception("a batch of %d requests failed; computing each of them alone", len(problems))
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
