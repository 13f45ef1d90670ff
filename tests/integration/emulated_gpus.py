"""Servers with GPUs, which a CPU stands in for and which say what they copy ahead; and what to look for in that."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.problems import random_inputs
from tests.kernels.cuda.devices import library_file
from tests.servers import wait_until

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import FLOAT32, Spec

ROOT = Path(__file__).parents[2]
ARENA = ("--arena-bytes", "64MiB")
INPUTS = random_inputs(Spec(FLOAT32, (8, 40, 40, 24), 3))
NBYTES = INPUTS.x.nbytes


@contextmanager
def emulated_gpus() -> Iterator[None]:
    """Makes servers that are started in the block find GPUs."""
    path = [str(Path(__file__).parent / "emulated"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("EMULATED_KERNELS", str(library_file()))
        yield


def gradients(client: bngrad.Client, x: Array | bngrad.AheadTensor) -> bngrad.FusedBatchNormGradV2:
    return client.fused_batch_norm_grad_v2(INPUTS.y_backprop, x, *INPUTS[2:])


def count(server: EmbeddedServer, what: str) -> int:
    """How often a GPU has said something."""
    return sum(line.endswith(what) for line in server.stderr().splitlines())


def wait_for(server: EmbeddedServer, what: str, times: int) -> None:
    wait_until(lambda: count(server, what) == times)


def read_nbytes(server: EmbeddedServer) -> int:
    """How much GPUs have read from copies ahead."""
    return sum(map(int, re.findall(r"^read (\d+) bytes from a copy ahead$", server.stderr(), re.MULTILINE)))
