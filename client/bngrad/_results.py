"""What the calls return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class FusedBatchNormGradV3(NamedTuple):
    """The outputs of TensorFlow's ``FusedBatchNormGradV3``: arrays of the caller's own, free to be written to.

    Attributes:
        x_backprop: The gradient of x; dtype and shape of x.
        scale_backprop: The gradient of scale; float32, shape (C,).
        offset_backprop: The gradient of offset; float32, shape (C,).
        reserve_space_4: Always empty; float32, shape (0,).
        reserve_space_5: Always empty; float32, shape (0,).
    """

    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array
    reserve_space_4: Array
    reserve_space_5: Array


class FusedBatchNormGradV2(NamedTuple):
    """The outputs of TensorFlow's ``FusedBatchNormGradV2``: arrays of the caller's own, free to be written to.

    Attributes:
        x_backprop: The gradient of x; dtype and shape of x.
        scale_backprop: The gradient of scale; float32, shape (C,).
        offset_backprop: The gradient of offset; float32, shape (C,).
        reserve_space_3: Always empty; float32, shape (0,).
        reserve_space_4: Always empty; float32, shape (0,).
    """

    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array
    reserve_space_3: Array
    reserve_space_4: Array


class BatchNormTrainingBackprop(NamedTuple):
    """The outputs of oneDNN Graph's ``BatchNormTrainingBackprop``: arrays of the caller's own, free to be written to.

    Attributes:
        input_delta: The gradient of input_forward; its dtype and shape.
        gamma_delta: The gradient of gamma; dtype and shape of mean.
        beta_delta: The gradient of beta; dtype and shape of mean.
    """

    input_delta: Array
    gamma_delta: Array
    beta_delta: Array


class FusedBatchNormGradGrad(NamedTuple):
    """The gradients of TensorFlow's gradient ops: arrays of the caller's own, free to be written to.

    Attributes:
        grad_y_backprop: The gradient of y_backprop; dtype and shape of x.
        grad_x: The gradient of x; its dtype and shape.
        grad_scale: The gradient of scale; float32, shape (C,).
    """

    grad_y_backprop: Array
    grad_x: Array
    grad_scale: Array


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a server computes on.

    Attributes:
        name: Such as "cpu" or "cuda:0".
        description: What it is, in its maker's words.
        state: What its worker does: "starting" or "ready"; "unspecified" where this client does not know the word.
        restarts: How often its worker had to be started again after it died.
        memory_bytes: The size of its own memory; 0 for a CPU.
    """

    name: str
    description: str
    state: str
    restarts: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is.

    Attributes:
        version: The version of bngrad that it runs.
        devices: What it computes on.
        ops: The names of the ops that it computes.
        max_message_bytes: The largest request or answer that it takes or gives.
        arena_bytes: Its memory for the tensors of all requests in flight.
        requests: The requests in it at the moment.
        batch_sizes: How many batches it has computed; at index k, those of 2**k to 2**(k + 1) - 1 requests.
        stream_port: The TCP port of its endpoint for large tensors; 0 for none.
        local_directory: Where clients on its host find it and its shared memory; empty for nowhere.
        device_remark: Why it does not compute on some or all GPUs of its machine; empty where nothing is to be said.
    """

    version: str
    devices: tuple[Device, ...]
    ops: tuple[str, ...]
    max_message_bytes: int
    arena_bytes: int
    requests: int
    batch_sizes: tuple[int, ...]
    stream_port: int
    local_directory: str
    device_remark: str
