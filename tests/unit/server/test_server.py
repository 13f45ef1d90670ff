"""A server that is not started: what it says of its health."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2

from bngrad_server.config import ServerConfig
from bngrad_server.server import Server

TIMEOUT_S = 20.0


class _Pool:
    """Is ready; but whoever asks first learns late that it was not."""

    def __init__(self) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()

    @property
    def is_ready(self) -> bool:
        if self.asked.is_set():
            return True
        self.asked.set()
        assert self.answered.wait(TIMEOUT_S)
        return False


def test_health_does_not_fall_back_to_what_it_was_before_a_worker_was_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(ServerConfig(listen=(f"unix:{tmp_path / 'calls'}",), device="cpu", shared_bytes=0))
    try:
        pool = _Pool()
        with monkeypatch.context() as patch:
            patch.setattr(server, "engine", SimpleNamespace(pool=pool))
            slow = threading.Thread(target=server._update_health)
            slow.start()
            assert pool.asked.wait(TIMEOUT_S)
            quick = threading.Thread(target=server._update_health)
            quick.start()
            quick.join(0.2)  # unless it waits for the slow one
            pool.answered.set()
            slow.join()
            quick.join()
        said = server._health.Check(health_pb2.HealthCheckRequest(), cast(Any, None))
        assert said.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        server.stop(0)
