"""The parts of pages that are written from the results of benchmarks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
DOCS = _ROOT / "docs"
RESULTS = _ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Part:
    """What stands on a page between the markers ``<!-- NAME: … -->`` and ``<!-- end of NAME -->``."""

    page: Path
    name: str
    tables: Callable[[], str]

    def whole_page(self) -> str:
        """Returns the page with the tables of today's results.

        Raises:
            ValueError: The page has lost the markers.
        """
        markers = rf"(<!-- {self.name}: [^\n]*-->\n).*?(<!-- end of {self.name} -->\n)"
        place = re.compile(markers, re.DOTALL)
        page, count = place.subn(lambda found: f"{found[1]}\n{self.tables()}\n{found[2]}", self.page.read_text())
        if count != 1:
            raise ValueError(f"{self.page} has {count} places for {self.name}, not 1")
        return page

    def write(self) -> None:
        """Writes the page."""
        self.page.write_text(self.whole_page())
