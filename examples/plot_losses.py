"""Draws the losses of the examples train_digits_*.py, of each framework alone and with bngrad.

python -m examples.plot_losses localhost:50051 losses.png
"""

from __future__ import annotations

import argparse
import sys

import matplotlib.pyplot as plt
from examples import train_digits_jax, train_digits_keras, train_digits_torch

import bngrad

EXAMPLES = {"PyTorch": train_digits_torch, "Keras on TensorFlow": train_digits_keras, "JAX": train_digits_jax}


def main(target: str, path: str) -> None:
    figure, panels = plt.subplots(1, len(EXAMPLES), figsize=(10, 3.4), sharey=True, layout="constrained")
    for panel, (name, example) in zip(panels, EXAMPLES.items(), strict=True):
        stock, ours = example.losses(target)
        panel.plot(stock, color="tab:orange", linewidth=4, alpha=0.5, label="alone")
        panel.plot(ours, color="tab:blue", linewidth=1, label="with bngrad")
        panel.set(title=name, xlabel="step", yscale="log")
        panel.legend()
    panels[0].set_ylabel("loss")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    parser.add_argument("path", help="the image to write, such as losses.png")
    arguments = parser.parse_args()
    try:
        main(arguments.target, arguments.path)
    except (bngrad.BngradError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
