"""Times in which the process did nothing."""

from __future__ import annotations

import pytest
from tests.clock import Clock

from bngrad_server.runtime import pauses


def test_only_a_look_that_is_late_shows_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pauses, "time", clock)
    noticed = pauses.Pauses()
    found = []
    for wait_s in (0.1, 7.0, 0.1):
        clock.now += wait_s
        found.append(noticed.since_last_look())
    assert found == [0.0, 7.0, 0.0]
