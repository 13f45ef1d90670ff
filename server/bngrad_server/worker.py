"""The worker process: owns one device, and computes what it is sent.

Run as ``python -m bngrad_server.worker DEVICE THREADS PIPE_FD ARENA_FD ARENA_NBYTES``. Once its kernels are compiled it
sends the device's description, then answers every list of `Task` with a list of failures, and ends when the front
process is gone.
"""

from __future__ import annotations

import logging
import mmap
import signal
import sys
from multiprocessing.connection import Connection

from bngrad_kernels import backends
from bngrad_kernels.problem import BackEnd, Problem
from bngrad_server.arena import map_arena
from bngrad_server.staging import Task, staged_problem

logger = logging.getLogger(__name__)


def main() -> None:
    """Serves the front process until the pipe closes."""
    device, threads, pipe_fd, arena_fd, arena_nbytes = sys.argv[1:]
    # A terminal or a supervisor signals the whole group; only the front process decides when a worker ends.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    pipe: Connection[object, object] = Connection(int(pipe_fd))
    arena = map_arena(int(arena_fd), int(arena_nbytes))
    back_end = backends.create(device, threads=int(threads))
    back_end.warm_up()
    try:
        pipe.send(back_end.description)
        while True:
            tasks = pipe.recv()
            assert isinstance(tasks, list)
            pipe.send(_run(back_end, arena, tasks))
    except (EOFError, ConnectionError):
        return


def _run(back_end: BackEnd, arena: mmap.mmap, tasks: list[Task]) -> list[str | None]:
    """Computes tasks, and says for each why it failed, or None."""
    problems = [staged_problem(arena, task.offset, task.spec, has_scale=task.has_scale) for task in tasks]
    if len(problems) > 1:
        try:
            back_end.run(problems)
        except Exception:
            logger.exception("a batch of %d failed; running each of it alone", len(problems))
        else:
            return [None] * len(problems)
    return [_run_alone(back_end, problem) for problem in problems]


def _run_alone(back_end: BackEnd, problem: Problem) -> str | None:
    try:
        back_end.run([problem])
    except Exception as error:
        logger.exception("%s failed", problem.spec)
        return type(error).__name__
    return None


if __name__ == "__main__":
    main()
