"""One of two processes that train a model by gloo; arguments: DDP or FSDP, rank, store, target."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import bngrad
import bngrad.torch


def gradients(model: nn.Module, manner: str, rank: int) -> list[Tensor]:
    parallel = DistributedDataParallel(model) if manner == "DDP" else model
    if manner == "FSDP":
        fully_shard(model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        parallel(torch.randn(8, 3, 6, 6, generator=generator)).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def main(manner: str, rank: int, store: str, target: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's own name may have no address
    patience = timedelta(minutes=2)  # if the other process has failed
    dist.init_process_group("gloo", f"file://{store}", patience, rank=rank, world_size=2)
    with bngrad.Client(target) as client:
        ours = gradients(bngrad.torch.convert_batchnorm(model(), client), manner, rank)
        stock = gradients(model(), manner, rank)
    for our, their in zip(ours, stock, strict=True):
        torch.testing.assert_close(our, their)
    dist.destroy_process_group()
    print("the gradients agree", flush=True)
    os._exit(0)  # PyTorch sometimes aborts as it unloads gloo: https://github.com/pytorch/pytorch/issues/190489


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
