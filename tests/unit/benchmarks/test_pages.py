"""The tables on pages that are written from the results of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.gpu import page as gpu
from benchmarks.kernels import page as kernels
from benchmarks.pages import Part
from benchmarks.transport import page as transport

PARTS = [*kernels.PARTS, *gpu.PARTS, *transport.PARTS]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.page.name}-{part.name}")
def test_the_tables_on_a_page_are_those_of_the_committed_results(part: Part) -> None:
    assert part.whole_page() == part.page.read_text(), "run make kernels-page transport-page"


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- speeds: from here -->\nold\n<!-- end of speeds -->\nafter\n")
    Part(page, "speeds", lambda: "new\n").write()
    assert page.read_text() == "before\n<!-- speeds: from here -->\n\nnew\n\n<!-- end of speeds -->\nafter\n"


def test_a_page_that_has_lost_its_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- speeds: from here -->\nold\n")
    with pytest.raises(ValueError, match="0 places for speeds"):
        Part(page, "speeds", lambda: "new\n").write()
    assert page.read_text() == "before\n<!-- speeds: from here -->\nold\n"
