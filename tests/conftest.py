"""What all tests share: Hypothesis' profile, the terminal's size, time limits, and the summary of the run."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import PurePath

import pytest
from hypothesis import HealthCheck, settings

# PyTorch for GPUs brings Triton, and imports it late. The import crashes in a process that has imported TensorFlow.
with suppress(ImportError):
    import triton  # noqa: F401

# What TensorFlow computes, and which layouts, must not depend on the processor, by which it else chooses its kernels.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# On a busy machine an example may stand still for seconds; that is no failure.
settings.register_profile("slow machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow machine")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accepts the settings of pytest-timeout where it is missing, as on a machine that has a GPU and little else."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "unused without pytest-timeout")
        parser.addini("timeout_method", "unused without pytest-timeout")


@pytest.fixture(autouse=True, scope="session")
def _terminal() -> Iterator[None]:
    """Sets the width of tables and help texts, which otherwise depend on the terminal that the tests run in."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COLUMNS", "80")
        environment.setenv("LINES", "24")
        environment.delenv("FORCE_COLOR", raising=False)
        yield


_cpu_seconds = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes the processor time since the last report, of this process and of its children that have ended."""
    global _cpu_seconds
    report = yield
    _cpu_seconds, before = sum(os.times()[:4]), _cpu_seconds
    vars(report).update(cpu_seconds=_cpu_seconds - before)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how long the tests of each directory took, and why tests were skipped."""
    tests: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    cpu_seconds: dict[str, float] = defaultdict(float)
    skipped: Counter[tuple[str, str]] = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if not isinstance(report, (pytest.TestReport, pytest.CollectReport)):
            continue
        directory = str(PurePath(report.nodeid.partition("::")[0]).parent)
        if isinstance(report, pytest.TestReport):
            seconds[directory] += report.duration
            cpu_seconds[directory] += getattr(report, "cpu_seconds", 0.0)  # no process that crashed tells it
            tests[directory] += report.when == "call" or report.skipped
        if report.skipped and isinstance(report.longrepr, tuple):
            skipped[directory, report.longrepr[2].removeprefix("Skipped: ")] += 1
    if len(seconds) > 1:
        terminalreporter.section("time by directory, over all processes, and of processors")
        for directory in sorted(seconds, key=lambda each: -seconds[each]):
            times = f"{seconds[directory]:8.1f} s {cpu_seconds[directory]:8.1f} s"
            terminalreporter.line(f"{times} {tests[directory]:6} tests  {directory}")
    if skipped:
        terminalreporter.section("skipped")
        for (directory, reason), count in sorted(skipped.items()):
            terminalreporter.line(f"{count:6} in {directory}: {reason}")
