"""What one server's answers tell of it, over whichever transport: its load, and that it is alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import grpc

from bngrad_wire.load_report import LoadReport, parse

_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_SILENT_S = 2.0
"""After this a server that calls wait for, and that nothing was heard of, is asked whether it is alive."""


class Answer(Protocol):
    """A call of grpcio that may not have been answered yet."""

    def done(self) -> bool:
        """Whether it was answered, or failed."""
        ...

    def code(self) -> grpc.StatusCode:
        """How it ended."""
        ...

    def details(self) -> str | None:
        """What grpcio says of that."""
        ...


class _Question(NamedTuple):
    """A question to the server, and when it was asked, on the monotonic clock."""

    answer: Answer
    asked_at: float


class ServerState:
    """The state of one server.

    Attributes:
        load: The last report of its load; the same object until there is another one.
    """

    def __init__(self, ask: Callable[[], Answer] | None = None, may_leave: Callable[[], bool] = bool) -> None:
        """Has heard nothing yet.

        Args:
            ask: Asks the server anything, without waiting; the answer fails if there is none within seconds.
            may_leave: Returns whether calls that the server does not answer may be made elsewhere.
        """
        self.load: LoadReport | None = None
        self._load_text: str | bytes = ""
        self._ask = ask
        self._may_leave = may_leave
        self._heard_at = 0.0
        self._mutex = threading.RLock()
        self._question: _Question | None = None

    def hear(self, load_text: str | bytes | None = None) -> None:
        """Records an answer, and the value of its header with the load, if it has one; ignores a malformed value."""
        self._heard_at = time.monotonic()
        if isinstance(load_text, str) and load_text != self._load_text:
            self._load_text = load_text
            self.load = parse(load_text) or self.load

    def is_lost(self, waited_s: float) -> bool:
        """Whether the server is frozen: it keeps its connections, but answers nothing.

        It is asked once nothing was heard of it for a while; a later look finds whether it has answered.

        Args:
            waited_s: How long a call has been waiting for the server, in seconds.
        """
        now = time.monotonic()
        silent_since = max(self._heard_at, now - waited_s)
        if now - silent_since < _SILENT_S:
            return False
        try:
            # Does not wait where another call asks, for which it may have to get a token.
            return self._mutex.acquire(blocking=False) and self._is_unanswered(now, silent_since)
        finally:
            try:  # noqa: SIM105 - Ctrl-C could come before suppress() has begun
                self._mutex.release()
            except RuntimeError:  # it is not held
                pass

    def _is_unanswered(self, now: float, silent_since: float) -> bool:
        """Whether the server has let a question of this silence pass; asks it if there is none yet."""
        question = self._question
        if question is not None and not question.answer.done():
            return False
        if question is not None and question.asked_at >= silent_since:
            # One that refuses connections is not frozen: it stops once it has answered the calls that it has.
            code, details = question.answer.code(), question.answer.details() or ""
            is_alive = code not in _NO_ANSWER or "refused" in details
            if is_alive:
                self._heard_at = now
            return not is_alive
        if self._ask is not None and self._may_leave():
            with suppress(Exception):  # no token, a closed channel, no thread: calls that wait are not to blame
                self._question = _Question(self._ask(), now)
        return False
