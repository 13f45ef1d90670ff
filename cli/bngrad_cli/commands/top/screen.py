"""The screen of ``bngrad top``: a server's status as tables."""

from __future__ import annotations

from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bngrad_cli.terminal import plain_table
from bngrad_wire.printable import printable

_BARS = " ▁▂▃▄▅▆▇█"
_MINUTE_S = 60
_SHOWN_FAILURES = 5
_COLUMNS_WITH_REQUEST = 100
_FRONT = {"name": "front", "state": "ready", "restarts": 0, "description": "computes small requests and shared memory"}
"""The front process of a server that has computed requests there, as a row of the devices."""


def screen(address: str, status: dict[str, Any], *, columns: int | None = None) -> RenderableType:
    """Returns what is shown of the status of the server at this address; with ``columns``, a line for each failure."""
    server, points = status["server"], status["points"]
    parts: list[RenderableType] = [_head(address, server), _numbers(server, points)]
    if server["failures"]:  # before what is less urgent, so that a small terminal shows them
        parts.append(_failures(server, columns))
    parts.append(_devices(server, points))
    if status["recent"] is not None:
        parts += [_times(status["recent"]), _minute(status["recent"], points)]
    return Group(*parts)


def _head(address: str, server: dict[str, Any]) -> RenderableType:
    state = ("stopping" if server["stopping"] else "not ready", "bold red")
    if server["ready"]:
        state = ("ready", "bold green")
    up_s = int(server["time"] - server["started_at"])
    up = f"{up_s // 3600}:{up_s // 60 % 60:02}:{up_s % 60:02}"
    return Text.assemble(("bngrad ", "bold"), server["version"], f" on {address}: ", state, f", up {up}")


def _numbers(server: dict[str, Any], points: list[dict[str, Any]]) -> RenderableType:
    table = plain_table()
    for name in ("requests/s", "failed/s", "tensors/s", "median", "99 %", "waiting", "in flight", "arena"):
        table.add_column(name, no_wrap=True, justify="right")
    idle = {"answered": 0.0, "failed": 0.0, "bytes": 0.0, "p50": None, "p99": None}
    last: dict[str, Any] = points[-1] if points else idle
    table.add_row(
        f"{last['answered']:.0f}",
        Text(f"{last['failed']:.0f}", style="red" if last["failed"] else ""),
        _size(last["bytes"]),
        _seconds(last["p50"]),
        _seconds(last["p99"]),
        str(server["queue"]["requests"]),
        str(server["in_flight"]),
        f"{100 * server['arena']['used'] / server['arena']['bytes']:.0f} %",
    )
    return table


def _devices(server: dict[str, Any], points: list[dict[str, Any]]) -> RenderableType:
    table = plain_table()
    for name in ("device", "worker", "utilisation", "", "memory", "restarts", "what it is"):
        justify: Literal["left", "right"] = "right" if name in {"", "memory", "restarts"} else "left"
        table.add_column(name, no_wrap=name != "what it is", justify=justify)
    for device in (*server["devices"], *([_FRONT] if server.get("front_busy_s") else [])):
        busy = points[-1]["busy"].get(device["name"], 0.0) if points else 0.0
        table.add_row(
            device["name"],
            Text(device["state"], style="green" if device["state"] == "ready" else "bold red"),
            ProgressBar(total=1.0, completed=busy, width=16),
            f"{100 * busy:.0f} %",
            _size(device["resident_bytes"]) if "resident_bytes" in device else "-",
            str(device["restarts"]),
            Text(device["description"], no_wrap=True, overflow="ellipsis"),
        )
    return table


def _times(recent: dict[str, Any]) -> RenderableType:
    """The latencies of the last minute, and the time by stage."""
    times = {"median": recent["p50"], "90 %": recent["p90"], "99 %": recent["p99"], **recent["stages"]}
    table = plain_table(title="last minute", title_justify="left")
    for name in times:
        table.add_column(name, no_wrap=True, justify="right")
    table.add_row(*map(_seconds, times.values()))
    return table


def _minute(recent: dict[str, Any], points: list[dict[str, Any]]) -> RenderableType:
    """The last minute: requests per second, and the histogram of latencies."""
    table = Table.grid(padding=(0, 2))
    answered = _sparkline([point["answered"] for point in points[-_MINUTE_S:]])
    table.add_row(Text("requests/s", style="bold"), Text(answered, style="blue"))
    used = [k for k, count in enumerate(recent["counts"]) if count]
    if used:
        low, high = used[0], used[-1] + 1
        first, last = (recent["first_bound"] * 2.0**k for k in (low - 1, high - 1))
        bars = Text(_sparkline(recent["counts"][low:high]), style="blue")
        table.add_row(Text("histogram", style="bold"), Text.assemble(f"{_seconds(first)} ", bars, f" {_seconds(last)}"))
    return table


def _failures(server: dict[str, Any], columns: int | None) -> RenderableType:
    """The last failures; with ``columns``, a line for each, and its request only where that leaves room for why."""
    table = plain_table(title="recent failures", title_justify="left")
    is_line = columns is not None
    has_request = columns is None or columns >= _COLUMNS_WITH_REQUEST
    for name in ("ago", "status", "client", *(["request"] if has_request else []), "why"):
        table.add_column(name, no_wrap=name in {"ago", "status"})
    for failure in server["failures"][:_SHOWN_FAILURES]:
        ago = _ago(max(server["time"] - failure["time"], 0))
        texts = (failure["client"], *([failure["request_id"]] if has_request else []), failure["message"])
        fitted = (Text(printable(text), no_wrap=is_line, overflow="ellipsis" if is_line else "fold") for text in texts)
        table.add_row(ago, Text(printable(failure["code"])), *fitted)
    return table


def _ago(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _sparkline(values: list[float]) -> str:
    highest = max(values, default=0) or 1
    return "".join(_BARS[round(value / highest * (len(_BARS) - 1))] for value in values)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.3g} µs"


def _size(nbytes: float) -> str:
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.3g} {name}"
    return f"{nbytes:.0f} B"
