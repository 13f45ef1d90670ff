"""The handle of a tensor that is sent ahead of the calls that need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np

from bngrad._ahead.upload import Place, Server, Upload
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import FieldViolation, invalid_argument
from bngrad.typing import Array
from bngrad_wire.mapped_file import address_of_array

Self = TypeVar("Self", bound="AheadTensor")


class AheadTensor:
    """A tensor that is sent before a call needs it, by `Client.send_ahead`; any op takes it in place of the tensor.

    It refers to the tensor too, which must not change until the last call that takes the handle has returned: where the
    server does not have the tensor, or no longer, the call sends it, with the same result. The server's memory is freed
    when the handle is closed or has gone, or the client is closed. Several calls and threads may use one handle.

    Attributes:
        dtype: The dtype of the tensor.
        shape: The shape of the tensor.
    """

    _upload: Upload | None = None  # also where Ctrl-C comes before `__init__` has set it

    def __init__(self, client: object, array: Array, wire: Array, upload: Upload | None) -> None:
        """For `Client.send_ahead` alone.

        Args:
            client: Stands for the client.
            array: The tensor as ops take it.
            wire: The same memory in C order, as it is sent.
            upload: Its sending; None if it is not sent.
        """
        self.dtype: np.dtype[Any] = array.dtype
        self.shape: tuple[int, ...] = array.shape
        self._client = client
        self._arrays: tuple[Array, Array] | None = (array, wire)
        self._upload = upload

    def __reduce__(self) -> NoReturn:
        raise TypeError("a tensor that was sent ahead is of one client, and cannot be pickled or copied")

    def close(self) -> None:
        """Lets the server forget the tensor; calls take the handle no longer. Closing again does nothing."""
        self._arrays = None
        if self._upload is not None:
            self._upload.close()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Returns the tensor itself, unless another dtype or a copy is asked for.

        Raises:
            ValueError: ``copy`` is False, and the dtype needs one.
        """
        array = array_of("the tensor", self)
        if copy is False and dtype is not None and np.dtype(dtype) != array.dtype:
            raise ValueError(f"copy must not be False for dtype {np.dtype(dtype)}, since the tensor is {array.dtype}")
        return np.array(array, dtype) if copy else np.asarray(array, dtype)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"bngrad.AheadTensor(shape={self.shape}, dtype={self.dtype.name})"


def array_of(field: str, tensor: AheadTensor) -> Array:
    """Returns the tensor itself; ``field`` is the argument's name, for errors.

    Raises:
        InvalidArgumentError: The handle was closed.
    """
    if tensor._arrays is None:
        description = f"{field} must be a tensor or an open handle of one, but the {tensor!r} was closed"
        raise invalid_argument(FieldViolation(field, description))
    return tensor._arrays[0]


def check_handle(field: str, tensor: AheadTensor, client: object, name: str) -> None:
    """Checks that a handle is of a client, which has a name for errors.

    Raises:
        InvalidArgumentError: It is of another one.
    """
    if tensor._client is not client:
        description = f"{field} must be a tensor or a handle of {name}, but the {tensor!r} is of another client"
        raise invalid_argument(FieldViolation(field, description))


def server_of(tensor: AheadTensor) -> Server | None:
    """Returns what makes the calls to the server that the tensor was sent to; None if it was sent to none."""
    return None if tensor._upload is None else tensor._upload.server


def places_of(
    tensors: Mapping[str, AheadTensor],
    arrays: Mapping[str, Array],
    server: Server,
    deadline: Deadline,
    cancellation: Cancellation,
) -> dict[str, tuple[Upload, Place]]:
    """Returns which of a call's tensors are in a server, and where; waits for what is being sent there.

    Args:
        tensors: The handles, by the names of their fields.
        arrays: The tensors that the call would send, in C order; only what was sent as it lies in memory is of use.
        server: Makes the calls to the server.
        deadline: How long to wait.
        cancellation: Lets another thread end the wait.
    """
    places = {}
    for field, tensor in tensors.items():
        upload, held = tensor._upload, tensor._arrays
        if upload is None or held is None or field not in arrays or not _are_same(held[1], arrays[field]):
            continue
        if (place := upload.place(server, deadline, cancellation)) is not None:
            places[field] = upload, place
    return places


def _are_same(array: Array, other: Array) -> bool:
    return (address_of_array(array), array.shape, array.dtype) == (address_of_array(other), other.shape, other.dtype)


def release(tensor: AheadTensor) -> None:
    """Lets a handle refer to the tensor no longer, until `renew`."""
    tensor._arrays = None


def renew(tensor: AheadTensor, array: Array, wire: Array) -> None:
    """Lets a handle refer to the tensor again, which may have moved; the arguments are as for a new handle."""
    tensor._arrays = array, wire
