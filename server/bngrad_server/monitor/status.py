"""The current state of the engine, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bngrad_server.engine import Engine


def engine_status(engine: Engine) -> dict[str, Any]:
    """Returns the state of an engine; counters count since the start, sizes are in bytes."""
    batcher, arena, regions = engine.batcher, engine.arena, engine.regions
    counts, (jobs, jobs_nbytes), unread = batcher.counts, batcher.waiting(), engine.load.unread_connections
    ahead = engine.sent_ahead.tensors
    devices = zip(engine.pool.status(), engine.pool.resident_bytes(), strict=True)
    return {
        **engine.observer.metrics.status(),
        "in_flight": engine.admission.admitted + unread,
        "queue": {"requests": jobs + unread, "bytes": jobs_nbytes},
        "batches": {
            "sizes": list(counts.sizes),
            "requests": counts.jobs,
            "nbytes": list(counts.nbytes),
            "bytes": counts.jobs_nbytes,
        },
        "reruns": counts.reruns,
        "quarantined": counts.quarantined,
        "arena": {"bytes": arena.file_nbytes, "used": arena.used_bytes},
        "ahead": {"count": len(ahead), "bytes": ahead.nbytes, "evicted": ahead.evicted},
        "regions": {"count": len(regions), "bytes": regions.nbytes, "kept": regions.kept_nbytes},
        "front_busy_s": counts.front_busy_s,
        "event_loop_busy_s": engine.load.event_loop_busy_s,
        "devices": [
            {**asdict(device), "state": device.state.value, "resident_bytes": nbytes} for device, nbytes in devices
        ],
        "compiling": list(engine.pool.compiling),
        "failures": engine.observer.recent_failures(),
        "failures_left_out": engine.observer.failures_left_out,
    }
