"""Lets a client compute the gradients of the batch normalisation layers of Keras 3 on TensorFlow.

    with bngrad.Client("localhost:50051") as client:
        bngrad.keras.convert(model, client)
        model.fit(x, y)

Needs the extra ``bngrad[keras]``.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

try:
    import keras
    import tensorflow as tf
    from keras import ops
except ImportError as error:
    raise ImportError(
        "bngrad.keras needs Keras and TensorFlow: pip install '.[keras]' in a checkout of bngrad"
    ) from error

from bngrad._client import Client, check_client
from bngrad.tensorflow._gradients import gradients

__all__ = ["BatchNormalization", "convert", "revert"]

Model = TypeVar("Model")

_EXPANDED = {  # the rank and the axis of the channels: data format, and dimensions of length 1 to insert
    (2, 1): ("NHWC", (1, 1)),
    (3, 2): ("NHWC", (1,)),
    (3, 1): ("NCHW", (3,)),
    (4, 3): ("NHWC", ()),
    (4, 1): ("NCHW", ()),
    (5, 4): ("NDHWC", ()),
    (5, 1): ("NCDHW", ()),
}
_DTYPES = ("float16", "bfloat16", "float32")


@keras.saving.register_keras_serializable("bngrad")
class BatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc] # Keras has no types
    """``keras.layers.BatchNormalization`` whose gradients a client computes.

    The forward pass, the weights and the configuration are Keras' own. The client computes the gradients in training,
    for inputs of 2 to 5 dimensions in float32, float16 or bfloat16, with the channels last or second; they can be
    differentiated once more. Anything else is Keras' own: inference, frozen layers, masks, ``renorm``,
    ``synchronized``, float64, and every layer without a client.

    In graphs, errors of the client reach the user as errors of TensorFlow's runtime that contain its text; in eager
    code as they are. XLA cannot call Python, so ``supports_jit`` is false, and Keras compiles no model with such a
    layer by XLA.

    Attributes:
        client: Computes the gradients; never saved, copied or pickled with the layer. None for Keras' own.
    """

    def __init__(self, *args: Any, client: Client | None = None, **kwargs: Any) -> None:
        """Takes the arguments of ``keras.layers.BatchNormalization``, and a client."""
        _check_backend()
        if client is not None:
            check_client(client)
        super().__init__(*args, **kwargs)
        self.client = client
        self.supports_jit = False

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalises the inputs as Keras does; in training, the client computes the gradients."""
        rank, dtype = len(inputs.shape), keras.backend.standardize_dtype(inputs.dtype)
        expanded = _EXPANDED.get((rank, self.axis % rank)) if dtype in _DTYPES else None
        is_plain = mask is None and not getattr(self, "renorm", False) and not self.synchronized
        if expanded is None or self.client is None or not (is_plain and training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        mean, variance = _moments(ops.cast(inputs, "float32"), self.axis % rank)
        kept = self.momentum
        self.moving_mean.assign(ops.cast(self.moving_mean, "float32") * kept + mean * (1.0 - kept))
        self.moving_variance.assign(ops.cast(self.moving_variance, "float32") * kept + variance * (1.0 - kept))
        channels = self.moving_mean.shape[0]
        gamma = ops.cast(self.gamma, "float32") if self.scale else tf.ones(channels)
        beta = ops.cast(self.beta, "float32") if self.center else tf.zeros(channels)
        return self._normalized(inputs, gamma, beta, mean, variance, *expanded)

    def _normalized(
        self, x: Any, gamma: Any, beta: Any, mean: Any, variance: Any, data_format: str, inserted: tuple[int, ...]
    ) -> Any:
        """Returns the output, whose gradient by x, gamma and beta is a call of the client."""
        client = self.client
        assert client is not None
        arguments = {"epsilon": self.epsilon, "data_format": data_format}

        @tf.custom_gradient  # type: ignore[untyped-decorator] # TensorFlow has no types
        def normalize(x: Any, gamma: Any, beta: Any) -> Any:
            wide = ops.cast(x, "float32")
            y = ops.batch_normalization(wide, mean, variance, self.axis, beta, gamma, self.epsilon)

            def backward(y_backprop: Any) -> Any:
                large = [tf.cast(y_backprop, x.dtype), x]
                for axis in inserted:
                    large = [tf.expand_dims(tensor, axis) for tensor in large]
                reserves = [mean, variance, tf.zeros(0)]
                outputs = gradients(client, client.fused_batch_norm_grad_v3, [*large, gamma], reserves, arguments)
                x_backprop, *others = outputs[:3]
                return [tf.reshape(x_backprop, tf.shape(x)), *others]

            return ops.cast(y, self.compute_dtype), backward

        return normalize(x, gamma, beta)


def _moments(wide: Any, axis: int) -> tuple[Any, Any]:
    """The mean and the variance of each channel: the bits of Keras' own, whose second order is not exact.

    TensorFlow's ``tf.nn.moments`` stops the gradient of the mean in the variance.
    """
    axes = [other for other in range(len(wide.shape)) if other != axis]
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    return tf.reshape(mean, [-1]), tf.reduce_mean(tf.math.squared_difference(wide, mean), axes)


def convert(model: Model, client: Client) -> Model:
    """Has a client compute the gradients of a model's batch normalisation layers; changes the model itself.

    Each ``keras.layers.BatchNormalization``, in models within the model too, becomes a `BatchNormalization`: the same
    object, with its weights. Layers of other classes that derive from Keras' stay as they are. Build the model first: a
    layer that does not exist yet is not converted, and a model without any is returned with a warning.

    Args:
        model: A layer, or the model that is compiled, not one within it: its next call of ``fit`` traces it again.
        client: Computes the gradients; it must stay open as long as they are.

    Returns:
        The model.

    Raises:
        TypeError: The client is no `bngrad.Client`, or the model no ``keras.layers.Layer``.
    """
    check_client(client)
    if not _exchange(model, keras.layers.BatchNormalization, BatchNormalization, client):
        expected = "keras.layers.BatchNormalization; subclasses stay as they are, and a model must be built before"
        warnings.warn(f"convert changed nothing: the model has no {expected}", stacklevel=2)
    return model


def revert(model: Model) -> Model:
    """Undoes `convert`: Keras computes the gradients of all layers. Returns the model, which is changed itself.

    XLA stays off until the model is compiled again.

    Raises:
        TypeError: The model is no ``keras.layers.Layer``.
    """
    _exchange(model, BatchNormalization, keras.layers.BatchNormalization, None)
    return model


def _exchange(model: Any, before: type, after: type, client: Client | None) -> int:
    """Returns how many layers there are."""
    _check_backend()
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(f"model must be a keras.layers.Layer, such as a keras.Model, not {model!r}")
    layers = [layer for layer in model._flatten_layers() if type(layer) in (before, BatchNormalization)]
    for layer in layers:
        layer.__class__ = after
        layer.client = client
        layer.supports_jit = client is None
    if getattr(model, "compiled", False):
        if client is not None:
            model.jit_compile = False
        model.train_function = model.test_function = model.predict_function = None
    return len(layers)


def _check_backend() -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"bngrad.keras needs Keras' backend 'tensorflow', not {keras.backend.backend()!r}")
