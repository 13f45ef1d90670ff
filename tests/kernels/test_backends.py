from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bngrad_kernels import backends
from bngrad_kernels.errors import DeviceUnavailableError

HAS_GPU = backends.devices().names != ["cpu"]


@pytest.mark.parametrize("device", ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:0:1", "cuda:²"])
def test_a_device_of_another_name_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda:N'"):
        backends.create(device)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda:N'"):
        backends.devices(device)


def test_devices_may_be_listed() -> None:
    assert backends.devices("cuda:0, cuda:3").names == ["cuda:0", "cuda:3"]
    assert backends.devices("cpu") == (["cpu"], None)
    with pytest.raises(ValueError, match="once"):
        backends.devices("cpu,cpu")


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_says_why() -> None:
    names, remark = backends.devices("auto")
    assert names == ["cpu"]
    assert remark is not None
    assert remark.startswith("CUDA finds no usable driver or GPU: ")


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_a_named_one_is_refused_in_a_sentence() -> None:
    with pytest.raises(DeviceUnavailableError, match="CUDA finds no usable driver or GPU: "):
        backends.create("cuda:0")


def test_without_cupy_both_say_how_to_get_it() -> None:
    script = """
import sys
sys.modules["cupy"] = None  # as if it were not installed
from bngrad_kernels import backends
from bngrad_kernels.errors import DeviceUnavailableError
try:
    backends.create("cuda:0")
except DeviceUnavailableError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=True)
    assert "CuPy cannot be imported" in done.stdout
    assert "pip install '.[cuda12]' or '.[cuda13]' in a checkout of bngrad" in done.stdout
