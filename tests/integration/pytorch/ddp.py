"""One of two processes that train a model by gloo, for the test of bngrad.torch; arguments: rank, store, target."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bngrad
import bngrad.torch


def gradients(model: nn.Module, rank: int) -> list[Tensor]:
    parallel = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        parallel(torch.randn(8, 3, 6, 6, generator=generator)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def main(rank: int, store: str, target: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's own name may have no address
    patience = timedelta(minutes=2)  # if the other process has failed
    dist.init_process_group("gloo", f"file://{store}", patience, rank=rank, world_size=2)
    with bngrad.Client(target) as client:
        ours = gradients(bngrad.torch.convert_batchnorm(model(), client), rank)
        stock = gradients(model(), rank)
    for our, their in zip(ours, stock, strict=True):
        torch.testing.assert_close(our, their)
    dist.destroy_process_group()
    print("the gradients agree")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
