"""What one server last reported of its load, over whichever transport."""

from __future__ import annotations

from bngrad_wire.load_report import LoadReport, parse


class ReportedLoad:
    """The last report of a server.

    Attributes:
        report: The report; the same object until there is another one.
    """

    def __init__(self) -> None:
        """Has no report yet."""
        self.report: LoadReport | None = None
        self._text = ""

    def update(self, text: str | bytes) -> None:
        """Takes the value of the header with the report; ignores one that is malformed."""
        if isinstance(text, str) and text != self._text:
            self._text = text
            self.report = parse(text) or self.report
