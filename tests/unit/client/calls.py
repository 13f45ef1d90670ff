"""Calls of either client, and what tests look up in a client."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest
from tests.unit.client.endpoints import SECONDS, Server

import bngrad
import bngrad.aio
from bngrad._shared_memory.pool import Pool
from bngrad._transports.selector import TransportSelector

__all__ = ["SECONDS"]

ClientClass: TypeAlias = type[bngrad.Client] | type[bngrad.aio.Client]

SMALL, MEDIUM, LARGE = (1, 2, 2, 4), (4, 32, 32, 8), (8, 64, 64, 16)
"""Shapes far below the size from which memory is shared, just above it, and too large for one message of grpcio."""


def use(made: bngrad.Client | bngrad.aio.Client, *calls: Callable[[Any], Any]) -> Any:
    """Makes calls by a client that was made outside of any event loop, and closes it; returns the last answer."""
    if isinstance(made, bngrad.Client):
        with made as client:
            return [call(client) for call in calls][-1]

    async def run() -> Any:
        async with made as client:
            return [await call(client) for call in calls][-1]

    return asyncio.run(run())


@contextmanager
def no_thread(name: str) -> Iterator[None]:
    """Lets no thread of this name start during the block, as where the system has no more."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(threading.Thread, "start", fail)
        yield


START_THREAD = "start_joinable_thread" if sys.version_info >= (3, 13) else "start_new_thread"
"""The built-in function by which `threading` starts a thread."""


@contextmanager
def interrupt_after(function: str, caller: str = "", module: str = "bngrad.") -> Iterator[None]:
    """Raises KeyboardInterrupt where a built-in function has returned to any, or this, function of such a module."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        is_there = frame.f_globals["__name__"].startswith(module) and caller in ("", frame.f_code.co_name)
        if event == "c_return" and is_there and argument.__name__ == function:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.setprofile(None)


def interrupt_at(step: int, call: Callable[[], object], modules: tuple[str, ...] = ("bngrad.",)) -> bool:
    """Raises KeyboardInterrupt at a step of a call, in modules whose names begin so.

    The steps are where a function begins or ends: there Python looks for signals.

    Returns:
        Whether the call has so many steps.
    """
    left = step

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "return", "c_return") and frame.f_globals["__name__"].startswith(modules):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.setprofile(None)
    return left < 0


def inputs(number: int, shape: tuple[int, ...] = (2, 3, 3, 4)) -> tuple[Any, ...]:
    x, stats = np.full(shape, number, np.float32), np.full(shape[-1], -number, np.float32)
    return x, x, stats, stats, stats


def right(client: bngrad.Client, x: Any, server: Server, **options: Any) -> Any:
    """Makes a call, which the server answers with x; checks and returns the gradient."""
    y_backprop, stats = client.empty(x.shape, x.dtype), np.arange(x.shape[-1], dtype=np.float32)
    y_backprop = y_backprop if is_shared(client, x) else np.zeros_like(x)
    result = client.fused_batch_norm_grad_v2(y_backprop, x, stats, stats, stats, **options)
    np.testing.assert_array_equal(result.x_backprop, x)
    np.testing.assert_array_equal(result.scale_backprop, stats)
    return result.x_backprop


def selector_of(client: bngrad.Client) -> TransportSelector:
    """Returns the transport selector of a client with one server."""
    (server,) = client._calls._load_balancer._servers.values()
    assert isinstance(server.selector, TransportSelector)
    return server.selector


def shared_pool(client: bngrad.Client) -> Pool | None:
    """Returns the memory that a client shares with its one server."""
    endpoints = selector_of(client)._discovery._current
    return None if endpoints is None else endpoints.pool


def is_shared(client: bngrad.Client, array: Any) -> bool:
    shared = shared_pool(client)
    return shared is not None and shared.locate(array) is not None


def tensor(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return np.resize(np.arange(999), shape).astype(dtype)


def located(client: bngrad.Client, shape: tuple[int, ...]) -> Any:
    array = client.empty(shape)
    array[...] = tensor(shape)
    return array
