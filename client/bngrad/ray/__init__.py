"""Servers on the nodes of a Ray cluster, and clients that follow them.

    with bngrad.ray.start(4, {"GPU": 1}) as fleet, fleet.client() as client:
        client.fused_batch_norm_grad_v3(...)

Ray places, starts and restarts the servers; tensors go straight from client to server, not through Ray.
"""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("bngrad.ray needs Ray: pip install '.[ray]' in a checkout of bngrad") from error

from bngrad.ray._fleet import Fleet, start
from bngrad.ray._replica import State

__all__ = ["Fleet", "State", "start"]
