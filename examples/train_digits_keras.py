"""Trains a network on scikit-learn's digits, with Keras on TensorFlow alone and with bngrad, and compares the losses.

python examples/train_digits_keras.py localhost:50051
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import keras
from sklearn.datasets import load_digits

import bngrad
import bngrad.keras


class Losses(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types.
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        self.values.append(logs["loss"])


def main(target: str) -> None:
    stock, ours = losses(target)
    difference = max(abs(a - b) for a, b in zip(stock, ours, strict=True))
    print(f"loss after {len(ours)} steps: {stock[-1]:.4f} with Keras, {ours[-1]:.4f} with bngrad")
    print(f"the losses differ by {difference:.1e} at most")


def losses(target: str) -> tuple[list[float], list[float]]:
    """Returns the losses with Keras alone, and with bngrad."""
    with bngrad.Client(target) as client:
        client.server_info()  # without a server, its error is clearer than that of a compiled function
        ours = train(bngrad.keras.convert(network(), client))  # the one line
    return train(network()), ours


def network() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            *(layers.Conv2D(16, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()),
            layers.MaxPooling2D(2),
            *(layers.Conv2D(32, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def train(model: Any) -> list[float]:
    """Trains the model, and returns the running mean of the loss at each step."""
    digits = load_digits()
    kept = Losses()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    model.fit(digits.images[..., None] / 16, digits.target, 32, shuffle=False, verbose=0, callbacks=[kept])
    return kept.values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    try:
        main(parser.parse_args().target)
    except bngrad.BngradError as error:
        sys.exit(f"{parser.prog}: {error}")
