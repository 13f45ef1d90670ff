"""The results of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bngrad.typing import Array


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
    """A device of a server.

    Attributes:
        name: Such as "cuda:0"; "cpu:0" for the first worker on a CPU, "cpu" for this process.
        description: The name that its maker gives it.
        state: The state of its worker: "starting" or "ready"; "unspecified" if this client does not know the state.
        restarts: How often its worker died and was started again.
        memory_bytes: The size of the device's own memory; 0 for a CPU.
    """

    name: str
    description: str
    state: str
    restarts: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself.

    Attributes:
        version: Its version of bngrad.
        devices: The devices that it computes on.
        ops: The names of the ops that it computes.
        max_message_bytes: The size of the largest gRPC message that it takes or sends.
        arena_bytes: The size of its memory for the tensors of all requests in flight.
        requests: How many requests it has received whose answers it has not sent.
        unread_connections: How many connections have sent what it has not read yet, most of them further requests.
        batch_sizes: How many batches it has computed; at index k, those of 2**k to 2**(k + 1) - 1 requests.
        stream_port: The server's TCP port for the SDK's own HTTP/2; 0 for none. Calls from other hosts then go by
            grpcio to the address that the client was given.
        stream_host: The host of that port; empty if the SDK connects to the address that it was given instead, whose
            port a mapping may have changed.
        local_directory: The directory of its Unix sockets for calls and shared memory on its host; empty for none.
        device_remark: Why it does not use some or all GPUs of its machine; empty if it uses all, or there are none.
        compiling: The kernels that are still being compiled for its CPU, such as ``float32-2``, the second order in
            float32. Meanwhile NumPy computes what needs them, more slowly; large tensors of the second order wait.
    """

    version: str
    devices: tuple[Device, ...]
    ops: tuple[str, ...]
    max_message_bytes: int
    arena_bytes: int
    requests: int
    unread_connections: int
    batch_sizes: tuple[int, ...]
    stream_port: int
    stream_host: str
    local_directory: str
    device_remark: str
    compiling: tuple[str, ...]
