"""The log: lines for people or JSON for machines, on stderr; in a storm only some of each kind.

Whoever logs never waits for whoever reads: of a pipe that is full and that nobody reads, the whole process would stand
still. Lines that find no room are left out, and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

_FORMAT, _LEVEL = "BNGRAD_LOG_FORMAT", "BNGRAD_LOG_LEVEL"
_PER_SECOND = 10
_MAX_KINDS = 1000
_STDERR = 2
_MAX_LINES = 1000
"""What waits to be written."""
_FLUSH_S = 1.0


def set_up(log_format: str, level: str) -> None:
    """Has this process log to stderr, and those that it starts; see `bngrad_server.config.ServerConfig`."""
    os.environ.update({_FORMAT: log_format, _LEVEL: level})
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    handler.addFilter(SamplingFilter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)


def set_up_as_parent() -> None:
    """Has this process log as the one that started it."""
    set_up(os.environ.get(_FORMAT, "console"), os.environ.get(_LEVEL, "info"))


class StderrHandler(logging.Handler):
    """Writes to stderr, by a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._left_out = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if self._lines.qsize() >= _MAX_LINES:
            self._left_out += 1
        else:
            self._lines.put(self.format(record))

    def flush(self) -> None:
        """Waits until all is written, but not for ever."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_FLUSH_S)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            _write_line(line)
            if self._left_out:
                left_out, self._left_out = self._left_out, 0
                what = {"name": __name__, "levelname": "WARNING", "msg": f"{left_out} lines were left out: nobody read"}
                _write_line(self.format(logging.makeLogRecord(what)))


def _write_line(line: str) -> None:
    rest = f"{line}\n".encode(errors="backslashreplace")
    with suppress(OSError):
        while rest:
            rest = rest[os.write(_STDERR, rest) :]


class Sampler:
    """Lets through so many of a kind within a second, and knows how many it did not.

    Attributes:
        left_out: How many of all kinds it has not let through so far.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._mutex = threading.Lock()
        self._seconds: dict[str, tuple[float, int]] = {}  # when they began, and how many came since

    def admit(self, kind: str) -> int | None:
        """Says how many of the kind were left out since the last one; None where this one is left out too."""
        with self._mutex:
            now = time.monotonic()
            start, count = self._seconds.get(kind, (now, 0))
            if now - start < 1 and count >= _PER_SECOND:
                self._seconds[kind] = start, count + 1
                self.left_out += 1
                return None
            left_out = max(count - _PER_SECOND, 0)
            if len(self._seconds) >= _MAX_KINDS:
                self._seconds.clear()
            self._seconds[kind] = (start, count + 1) if now - start < 1 else (now, 1)
            return left_out


class SamplingFilter(logging.Filter):
    """Lets only some of the lines of each kind through; those about requests were chosen by `Observer` already."""

    def __init__(self) -> None:
        super().__init__()
        self._sampler = Sampler()

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        if _fields(record):  # to choose once more would lose lines that nobody counts
            return True
        left_out = self._sampler.admit(f"{record.name}: {record.msg}")
        if left_out:
            record.fields = {"left_out": left_out}
        return left_out is not None


class ConsoleFormatter(logging.Formatter):
    """Lines for people; what is known of a request comes last."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """See `logging.Formatter`."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """An object for each line."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What is known of what a line is about; see `bngrad_server.telemetry.observer`."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields
