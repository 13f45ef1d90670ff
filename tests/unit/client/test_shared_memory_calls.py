"""Calls in shared memory: where their tensors may lie, and what becomes of them when a lease ends or a call fails."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
from contextlib import nullcontext, suppress
from types import FrameType

import numpy as np
import pytest
from tests.servers import wait_until
from tests.unit.client.calls import LARGE, SECONDS, located, right, selector_of, shared_pool, tensor
from tests.unit.client.endpoints import Server

import bngrad
from bngrad._shared_memory import pool as pool_module
from bngrad._transports.http2 import Http2Transport
from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_wire.http2 import RpcError


def test_an_output_with_gaps_in_shared_memory_leaves_them_as_they_are(served: Server) -> None:
    with bngrad.Client(served.target, transport="shared") as client:
        whole = client.empty((2 * LARGE[0], *LARGE[1:]))
        whole[...] = -1
        assert right(client, tensor(LARGE), served, out=whole[::2]).base is not None
        np.testing.assert_array_equal(whole[::2], tensor(LARGE))
        assert (whole[1::2] == -1).all()


@pytest.mark.parametrize("ended", ["x", "out"])
def test_a_lease_that_ended_alone_is_renewed(served: Server, ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "REGION_NBYTES", 1)  # so each array has a region of its own
    with bngrad.Client(served.target, transport="shared") as client:
        arrays = {"x": located(client, LARGE), "out": client.empty(LARGE)}
        pool = shared_pool(client)
        assert pool is not None
        found = pool.locate(arrays[ended])
        assert found is not None
        assert found.region._socket is not None
        found.region._socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: served.regions.kept_nbytes)
        for _ in range(2):
            right(client, arrays["x"], served, out=arrays["out"])


def test_a_tensor_that_was_sent_ahead_by_another_transport_is_copied(served: Server) -> None:
    """Shared memory is found again meanwhile."""
    x, stats = tensor(LARGE), np.ones(LARGE[-1], np.float32)
    with bngrad.Client(served.target) as client:
        right(client, x, served)
        discovery = selector_of(client)._discovery
        current = discovery._current
        assert current is not None
        assert current.unix is not None
        discovery.lose(current, current.unix)
        with client.send_ahead(x) as handle:
            wait_until(lambda: handle._upload is not None and handle._upload._place is not None)
            assert len(served.ahead) == 1
            discovery._blocked.clear()
            assert discovery._current is not None
            discovery.lose(discovery._current, current.unix)
            discovery._blocked.clear()
            result = client.fused_batch_norm_grad_v2(x, handle, stats, stats, stats)
        np.testing.assert_array_equal(result.x_backprop, x)
    assert served.ways == ["shared"] * 2


def test_calls_one_after_the_other_use_one_connection(served: Server) -> None:
    def refuse(way: str) -> None:
        raise InvalidArgumentError((FieldViolation("x", "x is refused for a test"),))

    with bngrad.Client(served.target, transport="shared") as client:
        for on_call in (lambda way: None, refuse, lambda way: None):
            served.on_call = on_call
            with pytest.raises(bngrad.InvalidArgumentError) if on_call is refuse else nullcontext():
                right(client, tensor(LARGE), served)
    assert served.local.connections == 1


def hold_calls(served: Server) -> tuple[threading.Event, threading.Event]:
    """Has a server keep calls waiting; returns what is set when one has arrived, and what releases them to fail."""
    arrived, released = threading.Event(), threading.Event()

    def hold(way: str) -> None:
        arrived.set()
        released.wait(SECONDS)
        raise RpcError(14, "for a test")

    served.on_arrival = hold
    return arrived, released


def test_every_output_of_a_failed_call_is_in_quarantine(served: Server) -> None:
    arrived, released = hold_calls(served)
    x, stats = tensor(LARGE), np.ones(LARGE[-1], np.float32)
    with bngrad.Client(served.target, transport="shared", retries=False) as client:
        outputs = client.empty(LARGE), client.empty(LARGE)
        while not arrived.is_set():  # on a busy machine the deadline may pass before that
            with pytest.raises(bngrad.DeadlineExceededError):
                client.fused_batch_norm_grad_grad(x, stats, stats, x, x, stats, stats, stats, out=outputs, timeout=0.3)
        quarantine = client._calls._quarantine
        assert all(quarantine.release([output]) is output for output in outputs)
        released.set()
        wait_until(lambda: all(quarantine.release([output]) is None for output in outputs))


def interrupt_after_failure(step: int) -> list[int]:
    """Raises KeyboardInterrupt at a step of this thread, once the attempt of its next call in shared memory has failed.

    Returns:
        What becomes the number of steps that are left.
    """
    left, has_failed = [step], False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal has_failed
        has_failed |= event == "return" and frame.f_code is Http2Transport.unary.__code__
        if has_failed and event in ("call", "return", "c_return") and frame.f_globals["__name__"].startswith("bngrad."):
            left[0] -= 1
            if left[0] < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    return left


def test_after_an_interrupt_at_any_step_of_its_failure_every_output_of_a_call_is_in_quarantine(served: Server) -> None:
    arrived, released = hold_calls(served)
    x, stats = tensor(LARGE), np.ones(LARGE[-1], np.float32)
    with bngrad.Client(served.target, transport="shared", retries=False) as client:
        quarantine = client._calls._quarantine
        for step in itertools.count():
            arrived.clear()
            while not arrived.is_set():  # as above
                outputs = client.empty(LARGE), client.empty(LARGE)
                left = interrupt_after_failure(step)
                try:
                    with suppress(KeyboardInterrupt, bngrad.DeadlineExceededError):
                        client.fused_batch_norm_grad_grad(
                            x, stats, stats, x, x, stats, stats, stats, out=outputs, timeout=0.1
                        )
                finally:
                    sys.setprofile(None)
            assert all(quarantine.release([output]) is output for output in outputs)
            if left[0] >= 0:
                break
        released.set()
    assert step > 5
