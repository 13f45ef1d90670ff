"""Sends the inputs of layers ahead of the backward passes that need them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from bngrad._ahead.tensor import AheadTensor, release, renew
from bngrad._client import Client
from bngrad._requests.request import in_wire_layout
from bngrad.torch import _layout
from bngrad.typing import Array


class _Current(threading.local):
    """The input of the backward pass that runs in this thread, if it was sent ahead."""

    tensor: AheadTensor | None = None


_current = _Current()
_LARGEST_BALANCE = 1000


class Inputs:
    """The inputs of one layer, which are sent ahead as long as most backward passes use what was sent.

    With ``torch.utils.checkpoint`` they do not: it computes the input again, and gives them another tensor. Those of
    training and of evaluation are counted apart: an evaluation without ``torch.no_grad`` has no backward pass.
    """

    def __init__(self) -> None:
        # Of those that were used, and those that were not, by whether the layer was training.
        self._balances = {True: 0, False: 0}

    def send(self, client: Client | None, x: Tensor, *, is_training: bool) -> SentInput | None:
        """Begins to send an input if that pays: to a server on another host, from the CPU's memory, in eager mode.

        A tensor of a subclass may have no values here; PyTorch takes it apart in the backward pass.
        """
        is_in_memory = type(x) is Tensor and x.is_cpu
        if client is None or self._balances[is_training] < 0 or not is_in_memory:
            return None
        return SentInput(self, client, x, is_training=is_training) if client._calls.is_remote else None

    def count(self, *, is_training: bool, was_used: bool) -> None:
        """Counts an input that was sent."""
        balance = self._balances[is_training] + (1 if was_used else -1)
        self._balances[is_training] = min(balance, _LARGEST_BALANCE)


class SentInput:
    """An input that was sent ahead, for one backward pass; it does not keep the input alive."""

    def __init__(self, inputs: Inputs, client: Client, x: Tensor, *, is_training: bool) -> None:
        """Begins to send."""
        tensor = client.send_ahead(*_layout.for_client((x,), channels_last=_layout.has_channels_last(x)))
        release(tensor)
        count = partial(inputs.count, is_training=is_training)

        def on_end(_: object) -> None:
            tensor.close()
            count(was_used=False)

        self._count = count
        self._tensor = tensor
        self._x: weakref.ref[Tensor] | None = weakref.ref(x, on_end)

    @contextmanager
    def used(self, x: Tensor) -> Iterator[None]:
        """Lets the operator that computes the gradient use what was sent, once, and if that was this input."""
        is_same = self._x is not None and self._x() is x
        if is_same:
            self._x = None
            self._count(was_used=True)
        _current.tensor = self._tensor if is_same else None
        try:
            yield
        finally:
            _current.tensor = None
            self._tensor.close()


def sent(x: Array) -> Array | AheadTensor:
    """Returns an input as it is, or the handle of what was sent of it."""
    if _current.tensor is None:
        return x
    renew(_current.tensor, *in_wire_layout(x))
    return _current.tensor
