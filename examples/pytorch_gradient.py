"""Compares the gradients of PyTorch's batch norm, whose backward pass a server computes, with PyTorch's own.

python examples/pytorch_gradient.py localhost:50051
"""

from __future__ import annotations

import argparse
import sys

import torch

import bngrad
import bngrad.torch


def main(target: str) -> None:
    torch.manual_seed(0)
    with bngrad.Client(target) as client:
        ours, theirs = bngrad.torch.BatchNorm2d(64, client=client), torch.nn.BatchNorm2d(64)
        for dtype in (torch.float32, torch.bfloat16):
            for memory_format in (torch.contiguous_format, torch.channels_last):
                x = torch.randn(32, 64, 28, 28).to(dtype).to(memory_format=memory_format).requires_grad_()
                gradients = [torch.autograd.grad((layer(x).float() ** 3).sum(), x)[0] for layer in (ours, theirs)]
                difference = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
                print(f"{dtype}, {memory_format}: differs from PyTorch's by {difference:.1e} of the largest value")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    try:
        main(parser.parse_args().target)
    except bngrad.BngradError as error:
        sys.exit(f"{parser.prog}: {error}")
