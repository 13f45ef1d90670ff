"""The parts of ``benchmarks.bench_transport``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

from bngrad_kernels.problem import Array, Problem

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


class Gradients(NamedTuple):
    """A contestant's answer."""

    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array


Call: TypeAlias = Callable[[], Gradients | None]
"""One request; None from contestants that compute nothing."""

Prepare: TypeAlias = Callable[[Problem], AbstractContextManager[Call]]
"""Makes calls for a problem's inputs, over one connection. Each thread has a call of its own."""
