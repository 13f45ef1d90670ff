"""The kernels' tables on the page about performance."""

from __future__ import annotations

from benchmarks.kernels import page


def test_the_tables_on_the_page_are_those_of_the_committed_results() -> None:
    text = page.PAGE.read_text()
    assert page.with_tables(text) == text, "run make kernels-page"
