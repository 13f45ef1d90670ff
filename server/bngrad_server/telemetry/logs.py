"""The log on stderr: lines for people or JSON for machines, sampled when there are too many of a kind.

A thread that logs never waits for the reader of stderr, since a full pipe would then stop the whole process. Lines that
find no room in the queue are left out, and their number is logged.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from bngrad_wire.printable import printable

_FORMAT, _LEVEL = "BNGRAD_LOG_FORMAT", "BNGRAD_LOG_LEVEL"
_PER_SECOND = 10
_MAX_KINDS = 1000
_STDERR = 2
_MAX_LINES = 1000
"""The most lines that wait to be written."""
_FLUSH_S = 1.0


def set_up(log_format: str, level: str) -> None:
    """Makes this process, and the ones it starts, log to stderr; see `bngrad_server.config.ServerConfig`."""
    os.environ.update({_FORMAT: log_format, _LEVEL: level})
    handler = LineQueueHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    handler.addFilter(SamplingFilter())
    StderrListener(handler).start()
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for library in ("asyncio", "hpack"):  # their lines for debugging say nothing of the server
        logging.getLogger(library).setLevel("INFO" if level == "debug" else level.upper())
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_failure


def set_up_as_parent() -> None:
    """Makes this process log as the one that started it."""
    set_up(os.environ.get(_FORMAT, "console"), os.environ.get(_LEVEL, "info"))


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        name = failure.thread.name if failure.thread is not None else "unknown"
        logging.getLogger(__name__).error("the thread %s failed", name, exc_info=failure.exc_value)


class LineQueueHandler(QueueHandler):
    """Formats records in the thread that logs, and queues them; leaves out and counts those beyond `_MAX_LINES`.

    Attributes:
        left_out: The lines left out since the listener reported the last ones.
    """

    def __init__(self) -> None:
        # A SimpleQueue, which is bounded here, since a line may be logged amid a put: by a finaliser, for example.
        self.lines: queue.SimpleQueue[logging.LogRecord | threading.Event] = queue.SimpleQueue()
        super().__init__(self.lines)
        self.left_out = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """See `logging.handlers.QueueHandler`."""
        if self.lines.qsize() >= _MAX_LINES:
            self.left_out += 1
        else:
            self.lines.put_nowait(record)

    def flush(self) -> None:
        """Waits until all lines are written, at most `_FLUSH_S`; `QueueListener.stop` would wait without a limit."""
        written = threading.Event()
        self.lines.put(written)
        written.wait(_FLUSH_S)


class StderrListener(QueueListener):
    """Writes queued lines to stderr in a thread of its own.

    It writes to the descriptor: a thread that waits for a full pipe with the lock of `sys.stderr`, or of a handler,
    would keep the process from ending.
    """

    def __init__(self, handler: LineQueueHandler) -> None:
        super().__init__(handler.lines)
        self._handler = handler

    def handle(self, record: logging.LogRecord | threading.Event) -> None:
        """See `logging.handlers.QueueListener`; sets the event of a `LineQueueHandler.flush`."""
        if isinstance(record, threading.Event):
            record.set()
            return
        _write_line(record.getMessage())
        if self._handler.left_out:
            left_out, self._handler.left_out = self._handler.left_out, 0
            message = f"{left_out} lines were left out: stderr is read too slowly"
            notice = {"name": __name__, "levelname": "WARNING", "msg": message}
            _write_line(self._handler.format(logging.makeLogRecord(notice)))


def _write_line(line: str) -> None:
    rest = f"{line}\n".encode(errors="backslashreplace")
    with suppress(OSError):
        while rest:
            rest = rest[os.write(_STDERR, rest) :]


@dataclass(slots=True)
class _Second:
    """The current second of a kind: when it began, the events admitted in it, and those left out since the last one."""

    start: float
    admitted: int = 0
    left_out: int = 0

    def begin(self, now: float) -> None:
        if now - self.start >= 1:
            self.start, self.admitted = now, 0


class Sampler:
    """Admits at most 10 events of a kind within a second; counts the others.

    Attributes:
        left_out: The events not admitted so far, of all kinds.
    """

    def __init__(self, most_of_all: float = float("inf")) -> None:
        """Admits no more than ``most_of_all`` events of all kinds together within a second."""
        self.left_out = 0
        self._most_of_all = most_of_all
        self._mutex = threading.Lock()
        self._all = _Second(0.0)
        self._kinds: dict[str, _Second] = {}

    def admit(self, kind: str) -> int | None:
        """Returns how many of the kind were left out since the last one admitted; None if this one is left out too."""
        now = time.monotonic()
        with self._mutex:
            if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            second = self._kinds.setdefault(kind, _Second(now))
            for each in (second, self._all):
                each.begin(now)
            if second.admitted >= _PER_SECOND or self._all.admitted >= self._most_of_all:
                second.left_out += 1
                self.left_out += 1
                return None
            second.admitted += 1
            self._all.admitted += 1
            left_out, second.left_out = second.left_out, 0
            return left_out


class SamplingFilter(logging.Filter):
    """Samples lines by logger and message; `Observer` has sampled those about requests already."""

    def __init__(self) -> None:
        super().__init__()
        self._sampler = Sampler()

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        if _fields(record):  # to sample twice would lose lines without counting them
            return True
        left_out = self._sampler.admit(f"{record.name}: {record.msg}")
        if left_out:
            record.fields = {"left_out": left_out}
        return left_out is not None


class ConsoleFormatter(logging.Formatter):
    """Formats lines for people, with the fields of a request at the end.

    Clients give some of the text: all that is not printable is escaped. The further lines of a traceback are indented,
    so every other line begins a record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return "\n    ".join(map(printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging.Formatter
        """See `logging.Formatter`."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return printable(super().formatMessage(record) + fields)


class JsonFormatter(logging.Formatter):
    """Formats a JSON object for each line."""

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
    """The fields of the request that a line is about; see `bngrad_server.telemetry.observer`."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields
