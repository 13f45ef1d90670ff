"""A client on a host of its own: threads that call the fleet and check every answer, told what to do by lines.

``python -m tests.fleet.client TARGETS THREADS TRANSPORT`` answers each line with one of JSON: the counts of answers and
of errors, the slowest call since the last line in seconds, how long the oldest call has been running, what was logged,
and for each server at the addresses in the line how many batches it has computed; -1 if it does not answer.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any, cast

import numpy as np

import bngrad
from bngrad.typing import Transport


class Caller:
    """Makes calls until it is stopped."""

    def __init__(self, client: bngrad.Client) -> None:
        self._client = client
        self._inputs = _inputs()
        self._expected = client.fused_batch_norm_grad_v2(*self._inputs)
        self.mutex = threading.Lock()
        self.is_stopped = False
        self.answers = 0
        self.errors: list[str] = []
        self.slowest_s = 0.0
        self._running: dict[int, float] = {}  # by thread: since when

    @property
    def oldest_s(self) -> float:
        """How long the call has been running that began first."""
        now = time.monotonic()
        return max((now - began for began in self._running.copy().values()), default=0.0)

    def call(self) -> None:
        while not self.is_stopped:
            began = self._running[threading.get_ident()] = time.monotonic()
            try:
                result = self._client.fused_batch_norm_grad_v2(*self._inputs)
                is_same = all(a.tobytes() == b.tobytes() for a, b in zip(result, self._expected, strict=True))
                error = "" if is_same else "other bits"
            except bngrad.BngradError as failure:
                error = str(failure)
            with self.mutex:
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                self.answers += not error
                if error:
                    self.errors.append(error)


def _inputs() -> Any:
    rng = np.random.default_rng(0)
    x, y_backprop = rng.normal(size=(2, 4, 8, 8, 16)).astype(np.float32)
    return [y_backprop, x, *rng.uniform(0.5, 1.5, size=(3, 16)).astype(np.float32)]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(targets: str, threads: int, transport: Transport) -> None:
    logged, probes = _Kept(), dict[str, bngrad.Client]()
    logging.getLogger("bngrad").addHandler(logged)
    with bngrad.Client(targets.split(","), transport=transport) as client:
        caller = Caller(client)
        running = [threading.Thread(target=caller.call) for _ in range(threads)]
        for thread in running:
            thread.start()
        for line in sys.stdin:
            with caller.mutex:
                slowest_s, caller.slowest_s = caller.slowest_s, 0.0
            batches = {}
            for address in line.split():
                probe = probes.setdefault(address, bngrad.Client(f"{address}:50051", retries=False, timeout=2.0))
                try:
                    batches[address] = sum(probe.server_info().batch_sizes)
                except bngrad.BngradError:
                    batches[address] = -1
            times = {"slowest_s": slowest_s, "oldest_s": caller.oldest_s}
            report = {"answers": caller.answers, "errors": caller.errors, **times}
            print(json.dumps({**report, "log": logged.messages, "batches": batches}), flush=True)
        caller.is_stopped = True
        for thread in running:
            thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), cast("Transport", sys.argv[3]))
