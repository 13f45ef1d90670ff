"""The ops as methods of the client for threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from bngrad import _ops
from bngrad._requests.request import Call
from bngrad._results import (
    Array,
    BatchNormTrainingBackprop,
    FusedBatchNormGradGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
)

Result = TypeVar("Result")


class Gradients(ABC):
    """Computes gradients, by calls that whoever inherits this makes."""

    @abstractmethod
    def _run(self, call: Call[Result], timeout: float | None) -> Result:
        """Makes a call, which may take so many seconds; as long as by default where None."""

    def fused_batch_norm_grad_v3(
        self,
        y_backprop: Any,
        x: Any,
        scale: Any,
        reserve_space_1: Any,
        reserve_space_2: Any,
        reserve_space_3: Any,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        *,
        reserve_space_2_kind: str = "variance",
        out: Array | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradV3:
        """Computes TensorFlow's ``FusedBatchNormGradV3``, with the arguments of ``tf.raw_ops``.

        With ``xc = x - reserve_space_1``, ``rstd = 1 / sqrt(reserve_space_2 + epsilon)``, sums and means over all
        elements of a channel::

            x_backprop      = scale * rstd * (y_backprop - mean(y_backprop) - xc * rstd**2 * mean(y_backprop * xc))
            scale_backprop  = rstd * sum(y_backprop * xc)
            offset_backprop = sum(y_backprop)

        Without ``is_training``, ``x_backprop = scale * rstd * y_backprop``.

        Args:
            y_backprop: The gradient of the output; float16, bfloat16 or float32, 4-D or 5-D.
            x: The input of the forward pass; dtype and shape of y_backprop.
            scale: Gamma; float32, shape (C,).
            reserve_space_1: The mean; float32, shape (C,).
            reserve_space_2: The variance, see ``reserve_space_2_kind``; float32, shape (C,).
            reserve_space_3: float32 of any shape, or None. Its elements are ignored, as by the op on a CPU, and not
                sent.
            epsilon: Added to the variance; rounded to float32, finite and not negative.
            data_format: "NHWC" or "NCHW" for 4-D, "NDHWC" or "NCDHW" for 5-D tensors.
            is_training: Whether mean and variance were computed from x, rather than being constants.
            name: Ignored; here so that calls of the op need no change.
            reserve_space_2_kind: "variance" for the variance without epsilon, as from TensorFlow on a CPU, or
                "inverse_std" for rstd itself, as saved by cuDNN and PyTorch in training; epsilon is then unused.
            out: Where to put x_backprop; a NumPy array of its dtype and shape that overlaps no other argument.
            priority: From -8 to 8. Requests of a higher one are computed sooner; it is a head start, so that no other
                request waits for ever.
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(
            _ops.fused_batch_norm_grad_v3(
                y_backprop, x, scale, reserve_space_1, reserve_space_2, reserve_space_3,
                epsilon, data_format, is_training, reserve_space_2_kind, priority, out,
            ),
            timeout,
        )  # fmt: skip

    def fused_batch_norm_grad_v2(
        self,
        y_backprop: Any,
        x: Any,
        scale: Any,
        reserve_space_1: Any,
        reserve_space_2: Any,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        *,
        reserve_space_2_kind: str = "variance",
        out: Array | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradV2:
        """Computes TensorFlow's ``FusedBatchNormGradV2``, with the arguments of ``tf.raw_ops``.

        Like `fused_batch_norm_grad_v3`, but 4-D only and without reserve_space_3.

        Args:
            y_backprop: The gradient of the output; float16, bfloat16 or float32, 4-D.
            x: The input of the forward pass; dtype and shape of y_backprop.
            scale: Gamma; float32, shape (C,).
            reserve_space_1: The mean; float32, shape (C,).
            reserve_space_2: The variance, see ``reserve_space_2_kind``; float32, shape (C,).
            epsilon: Added to the variance; rounded to float32, finite and not negative.
            data_format: "NHWC" or "NCHW".
            is_training: Whether mean and variance were computed from x, rather than being constants.
            name: Ignored; here so that calls of the op need no change.
            reserve_space_2_kind: "variance" or "inverse_std", as in `fused_batch_norm_grad_v3`.
            out: Where to put x_backprop, as in `fused_batch_norm_grad_v3`.
            priority: As in `fused_batch_norm_grad_v3`.
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(
            _ops.fused_batch_norm_grad_v2(
                y_backprop, x, scale, reserve_space_1, reserve_space_2,
                epsilon, data_format, is_training, reserve_space_2_kind, priority, out,
            ),
            timeout,
        )  # fmt: skip

    def batch_norm_training_backprop(
        self,
        input_forward: Any,
        output_delta: Any,
        mean: Any,
        variance: Any,
        gamma: Any = None,
        *,
        epsilon: float,
        data_format: str = "NXC",
        out: Array | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> BatchNormTrainingBackprop:
        """Computes oneDNN Graph's ``BatchNormTrainingBackprop``: the training formula of `fused_batch_norm_grad_v3`.

        Args:
            input_forward: The input of the forward pass; float16, bfloat16 or float32, 2-D to 5-D.
            output_delta: The gradient of the output; dtype and shape of input_forward.
            mean: The mean; float32, or bfloat16 beside a bfloat16 input_forward, shape (C,).
            variance: The biased variance, without epsilon; dtype and shape of mean.
            gamma: The scale, dtype and shape of mean; None counts as ones.
            epsilon: Added to the variance; rounded to float32, finite and positive.
            data_format: "NXC" for channels last, "NCX" for channels second.
            out: Where to put input_delta, as x_backprop in `fused_batch_norm_grad_v3`.
            priority: As in `fused_batch_norm_grad_v3`.
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(
            _ops.batch_norm_training_backprop(
                input_forward, output_delta, mean, variance, gamma, epsilon, data_format, priority, out
            ),
            timeout,
        )  # fmt: skip

    def fused_batch_norm_grad_grad(
        self,
        grad_x_backprop: Any,
        grad_scale_backprop: Any,
        grad_offset_backprop: Any,
        y_backprop: Any,
        x: Any,
        scale: Any,
        reserve_space_1: Any,
        reserve_space_2: Any,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        *,
        reserve_space_2_kind: str = "variance",
        out: tuple[Array | None, Array | None] | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> FusedBatchNormGradGrad:
        """Computes the gradient that TensorFlow registers for ``FusedBatchNormGradV3`` and ``FusedBatchNormGradV2``.

        That is the second order: from the gradients of the first three outputs of `fused_batch_norm_grad_v3` those of
        its inputs y_backprop, x and scale. With ``is_training``, mean and variance are functions of x, so that they are
        computed from it rather than taken from the reserves; the reserves have no gradient.

        Args:
            grad_x_backprop: The gradient of x_backprop; dtype and shape of x.
            grad_scale_backprop: The gradient of scale_backprop; float32, shape (C,).
            grad_offset_backprop: The gradient of offset_backprop; float32, shape (C,).
            y_backprop: As in `fused_batch_norm_grad_v3`, and so are the next arguments up to ``is_training``.
            x: The input of the forward pass.
            scale: Gamma.
            reserve_space_1: The mean; used without ``is_training`` alone.
            reserve_space_2: The variance, see ``reserve_space_2_kind``; used without ``is_training`` alone.
            epsilon: Added to the variance.
            data_format: "NHWC" or "NCHW" for 4-D, "NDHWC" or "NCDHW" for 5-D tensors.
            is_training: Whether mean and variance were computed from x, rather than being constants.
            reserve_space_2_kind: "variance" or "inverse_std", as in `fused_batch_norm_grad_v3`.
            out: Where to put grad_y_backprop and grad_x: NumPy arrays of the dtype and shape of x that overlap neither
                each other nor any other argument; None for either that may be a new array.
            priority: As in `fused_batch_norm_grad_v3`.
            timeout: How long the call may take, in seconds; None for the client's own limit.

        Raises:
            BngradError: See the class.
        """
        return self._run(
            _ops.fused_batch_norm_grad_grad(
                grad_x_backprop, grad_scale_backprop, grad_offset_backprop,
                y_backprop, x, scale, reserve_space_1, reserve_space_2,
                epsilon, data_format, is_training, reserve_space_2_kind, priority, out,
            ),
            timeout,
        )  # fmt: skip
