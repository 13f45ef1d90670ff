"""What the measured times say: which way of training is the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bngrad_cli.commands.advise.contestants import LOCAL, PYTORCH, SERVER
from bngrad_cli.commands.advise.shapes import Layer

_WORTHWHILE = 1.03
"""By how much a choice by layer must be faster than one place for all layers."""
_TENSORS = 3
"""A call sends two tensors of the shape of x, and receives one."""


@dataclass(frozen=True)
class Times:
    """The times of all layers.

    Attributes:
        layers: The layers.
        milliseconds: For each layer the time of one backward pass, by contestant.
        itemsize: The bytes of an element of x.
    """

    layers: Sequence[Layer]
    milliseconds: Sequence[Mapping[str, float]]
    itemsize: int

    @property
    def count(self) -> int:
        """The number of batch normalisations of the model."""
        return sum(layer.count for layer in self.layers)

    def nbytes(self, layer: Layer) -> int:
        """The bytes that a call sends and receives, but for the vectors."""
        a, b, c, d = layer.shape
        return _TENSORS * a * b * c * d * self.itemsize

    def total(self, *names: str) -> float:
        """The time of the model's backward passes, each computed by the fastest of some contestants."""
        timed = zip(self.layers, self.milliseconds, strict=True)
        return sum(layer.count * min(found[name] for name in names) for layer, found in timed)

    def layers_won(self, name: str) -> int:
        """How many batch normalisations of the model a contestant computes faster than PyTorch."""
        timed = zip(self.layers, self.milliseconds, strict=True)
        return sum(layer.count for layer, found in timed if found[name] < found[PYTORCH])

    def break_even_gigabits(self) -> float | None:
        """The bandwidth at which the tensors alone take the time of computing here; None if nothing was computed here.

        Over a slower network, the fastest server is slower.
        """
        here = [name for name in self.milliseconds[0] if name != SERVER]
        if not here:
            return None
        nbytes = sum(layer.count * self.nbytes(layer) for layer in self.layers)
        return 8e-6 * nbytes / self.total(*here)


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        verdict: A sentence.
        code: The line of Python that does it; empty for none.
    """

    verdict: str
    code: str = ""


def advise(times: Times, target: str) -> Advice:
    """Returns the fastest way to train."""
    measured = times.milliseconds[0].keys()
    if PYTORCH in measured:
        return _beside_pytorch(times, target, [name for name in (SERVER, LOCAL) if name in measured])
    if LOCAL not in measured:
        install = "install PyTorch, or '.[local]' in a checkout of bngrad"
        return Advice(f"there is nothing to compare the server with: {install}")
    first, second = sorted((SERVER, LOCAL), key=times.total)
    ratio = times.total(first) / times.total(second)
    return Advice(f"{first} takes {ratio:.2f} times as long as {second}; compare with PyTorch where it is installed")


def _beside_pytorch(times: Times, target: str, clients: Sequence[str]) -> Advice:
    stock = times.total(PYTORCH)
    ways = [(PYTORCH,), *((name,) for name in clients), *((name, PYTORCH) for name in clients)]
    names = min(ways, key=lambda way: times.total(*way) * (1 if len(way) == 1 else _WORTHWHILE))
    if names == (PYTORCH,):
        others = ", ".join(f"{name} takes {times.total(name) / stock:.2f} times as long" for name in clients)
        return Advice(f"PyTorch alone is the fastest; {others}")
    count = times.count if len(names) == 1 else times.layers_won(names[0])
    told = f"use {names[0]} for {count} of {times.count} layers; all backward passes then take"
    code = f'bngrad.torch.convert_batchnorm(model, bngrad.Client("{target if names[0] == SERVER else LOCAL}")'
    code += ")" if len(names) == 1 else ', where="measured")'
    return Advice(f"{told} {times.total(*names) / stock:.2f} times as long as with PyTorch alone", code)
