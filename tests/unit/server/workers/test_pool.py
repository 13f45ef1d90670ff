"""The pool's waiting for its workers."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from bngrad_server.config import ServerConfig
from bngrad_server.workers import pool
from bngrad_server.workers.supervisor import Supervisor


class SlowSupervisor(Supervisor):
    """Becomes ready when the pool has said twice that it waits."""

    waits = 0

    def start(self) -> None: ...

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        self.waits += 1
        return self.waits > 2


def test_a_slow_start_is_explained_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "Supervisor", SlowSupervisor)
    nothing: Any = threading.Event()
    workers = pool.WorkerPool(ServerConfig(workers=1), ["cuda:0"], nothing, nothing, lambda: None)
    with caplog.at_level(logging.INFO, pool.logger.name):
        workers.start()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(line.startswith("waiting for the workers, which compile a kernel at the first start") for line in said)
