"""Files that are read again, with a clock that the tests set."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.clock import Clock

from bngrad_server.security import reload
from bngrad_server.security.reload import ReloadedFiles


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reload, "time", clock)
    return clock


def test_a_change_that_cannot_be_used_is_logged_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    files = ReloadedFiles([path], lambda: int(path.read_text()))
    path.write_text("nonsense")
    for _ in range(5):
        clock.now += 1
        assert files.content == 1
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_a_file_that_the_system_refuses_to_read_is_read_once_it_can_be(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "text"
    path.write_text("old")
    is_refused = False

    def read() -> str:
        if is_refused:  # as by the file's owner, or without a free descriptor
            raise PermissionError(13, "Permission denied", str(path))
        return path.read_text()

    files = ReloadedFiles([path], read)
    path.write_text("new text")
    is_refused = True
    for _ in range(5):
        clock.now += 1
        assert files.content == "old"
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    is_refused = False
    clock.now += 1
    assert files.content == "new text"


def test_an_empty_file_is_half_written_at_first(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "text"
    path.write_text("old")
    files = ReloadedFiles([path], path.read_text)
    for seconds, text, content in [
        (1.0, "", "old"),
        (1.5, "", "old"),
        (1.0, "new", "new"),
        (1.0, "", "new"),
        (1.5, "", "new"),
        (1.0, "", ""),
        (1.0, "last", "last"),
    ]:
        if path.read_text() != text:
            path.write_text(text)
        clock.now += seconds
        assert files.content == content


def test_a_change_while_the_files_are_read_is_noticed(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "text"
    path.write_text("old")

    def read() -> str:
        text = path.read_text()
        path.write_text("changed")
        return text

    files = ReloadedFiles([path], read)
    assert files.content == "old"
    clock.now += 1
    assert files.content == "changed"
