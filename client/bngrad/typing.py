"""Types of arguments and results, to annotate code that calls the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

__all__ = [
    "Array",
    "DataFormat",
    "DataFormat4D",
    "OneDnnDataFormat",
    "Output",
    "ReserveSpace2Kind",
    "SupportsArray",
    "SupportsDlpack",
    "Targets",
    "Tensor",
    "TorchTensor",
    "Transport",
]

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy array, as results are."""

DataFormat: TypeAlias = Literal["NHWC", "NCHW", "NDHWC", "NCDHW"]
"""The data formats of `Client.fused_batch_norm_grad_v3` and `Client.fused_batch_norm_grad_grad`."""

DataFormat4D: TypeAlias = Literal["NHWC", "NCHW"]
"""The data formats of `Client.fused_batch_norm_grad_v2`."""

OneDnnDataFormat: TypeAlias = Literal["NXC", "NCX"]
"""The data formats of `Client.batch_norm_training_backprop`."""

ReserveSpace2Kind: TypeAlias = Literal["variance", "inverse_std"]
"""What reserve_space_2 holds, or the variance of `Client.batch_norm_training_backprop`."""

Targets: TypeAlias = str | Sequence[str] | Callable[[], Sequence[str]]
"""The address of a server, the addresses of several, or a function that returns them."""

Transport: TypeAlias = Literal["auto", "unary", "stream", "shared"]
"""How tensors travel."""


class SupportsArray(Protocol):
    """A tensor that NumPy can read, such as one of TensorFlow, JAX or PyTorch."""

    def __array__(self) -> npt.NDArray[Any]:
        """Returns the tensor as a NumPy array."""
        ...


class SupportsDlpack(Protocol):
    """A tensor that DLPack can pass on."""

    def __dlpack__(self) -> Any:
        """Returns a capsule."""
        ...

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Returns the type and the number of the device."""
        ...


Tensor: TypeAlias = npt.NDArray[Any] | SupportsArray | SupportsDlpack | list[Any] | tuple[Any, ...]
"""What a call takes as a tensor: NumPy's arrays, anything else with ``__array__`` or ``__dlpack__``, or (nested) lists
or tuples of numbers."""


class TorchTensor(Protocol):
    """A tensor of PyTorch."""

    @property
    def requires_grad(self) -> bool:
        """Whether PyTorch records what is done with the tensor."""
        ...

    def is_neg(self) -> bool:
        """Returns whether the tensor is a view whose elements are negated when they are read."""
        ...


Output: TypeAlias = npt.NDArray[Any] | TorchTensor
"""What a call can write an output to."""
