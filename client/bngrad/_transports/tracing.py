"""Propagates OpenTelemetry's trace context to the server."""

from __future__ import annotations

import sys


def trace_context() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that carries the current span; none in a program that does not use OpenTelemetry."""
    propagate = sys.modules.get("opentelemetry.propagate")
    if propagate is None:
        return ()
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
