"""Lets a client compute the gradients of TensorFlow's fused batch norm.

    with bngrad.Client("localhost:50051") as client:
        bngrad.tensorflow.install(client)
        gradients = tape.gradient(loss, variables)  # batch norm's part comes from the client
        bngrad.tensorflow.uninstall()

Keras has no fused batch norm: see `bngrad.keras`. This module needs the extra ``bngrad[tensorflow]``.
"""

from __future__ import annotations

from typing import Any, get_args

try:
    import tensorflow as tf
    from tensorflow.python.ops import gen_nn_ops
except ImportError as error:
    raise ImportError(
        "bngrad.tensorflow needs TensorFlow: pip install '.[tensorflow]' in a checkout of bngrad"
    ) from error

from bngrad._client import Client, check_client
from bngrad.tensorflow._gradients import gradients
from bngrad.typing import ReserveSpace2Kind

__all__ = ["install", "uninstall"]

_OWN = {name: getattr(gen_nn_ops, name) for name in ("fused_batch_norm_grad_v2", "fused_batch_norm_grad_v3")}
"""TensorFlow's own functions."""
_KINDS: tuple[ReserveSpace2Kind, ...] = get_args(ReserveSpace2Kind)


def install(client: Client, *, reserve_space_2_kind: ReserveSpace2Kind = "variance") -> None:
    """Has the gradients of ``FusedBatchNormV2`` and ``FusedBatchNormV3`` computed by a client, until `uninstall`.

    This holds for the whole process, in eager code and in graphs that are traced from now on, by TensorFlow's
    ``GradientTape`` and ``tf.gradients``; the gradients can be differentiated once more. Functions that XLA compiles
    (``jit_compile=True``) cannot call Python, so TensorFlow refuses them.

    An invalid request is a ``tf.errors.InvalidArgumentError``, as by TensorFlow's own op. In graphs any other error of
    the client is a ``tf.errors.UnknownError`` with its text; in eager code it is raised as it is.

    Args:
        client: Computes the gradients; it must stay open as long as they are.
        reserve_space_2_kind: "inverse_std" for models that run on a GPU, where cuDNN saves that in training; else
            "variance".

    Raises:
        TypeError: The client is no `bngrad.Client`.
        ValueError: There is no such kind of ``reserve_space_2``.
    """
    check_client(client)
    if reserve_space_2_kind not in _KINDS:
        raise ValueError(f"reserve_space_2_kind must be one of {', '.join(_KINDS)}, not {reserve_space_2_kind!r}")
    for version, method in ((2, client.fused_batch_norm_grad_v2), (3, client.fused_batch_norm_grad_v3)):

        def op(
            y_backprop: Any, x: Any, scale: Any, *reserves: Any, method: Any = method, name: Any = None, **others: Any
        ) -> Any:
            spaces = {key: others.pop(key) for key in list(others) if key.startswith("reserve_space_")}
            others["data_format"] = tf.compat.as_str(others.get("data_format", "NHWC"))  # TensorFlow passes bytes
            if others.get("is_training", True):
                others["reserve_space_2_kind"] = reserve_space_2_kind
            return gradients(client, method, (y_backprop, x, scale), (*reserves, *spaces.values()), others)

        setattr(gen_nn_ops, f"fused_batch_norm_grad_v{version}", op)


def uninstall() -> None:
    """Has TensorFlow compute its gradients itself again, in eager code and in graphs that are traced from now on."""
    for name, own in _OWN.items():
        setattr(gen_nn_ops, name, own)
