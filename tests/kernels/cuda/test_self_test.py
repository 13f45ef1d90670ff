"""The self-test of a GPU: what it reaches, and what it says of GPUs that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.cuda.devices import EmulatedDevice, library_file
from tests.kernels.cuda.strict_environment import environment

from bngrad_kernels.cuda import self_test
from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.cuda.chunks.layout import Launch
from bngrad_kernels.cuda.descriptors import every_kernel
from bngrad_kernels.cuda.plan import cut
from bngrad_kernels.cuda.streams import CudaStream
from bngrad_kernels.errors import DeviceFailedError
from bngrad_kernels.spec import FLOAT32, Spec


class Observed(EmulatedDevice):
    """Notes the kernels that it runs, and changes or holds up those of a name."""

    errors: tuple[type[Exception], ...] = (ArithmeticError,)

    def __init__(self) -> None:
        super().__init__()
        self.launched: set[str] = set()
        self.locked: list[int] = []
        self.gate: threading.Event | None = None
        self.has_bit_errors = False

    def stream(self) -> CudaStream:
        stream: Any = super().stream()
        launch = stream.launch

        def observe(what: Launch, descriptors: int) -> None:
            self.launched.add(what.kernel.symbol)
            launch(what, descriptors)
            if self.has_bit_errors:
                stream._memory[-1 << 16 :] ^= 1
            if self.gate is not None:
                self.gate.wait()

        stream.launch = observe
        made: CudaStream = stream
        return made

    def register(self, memory: Any) -> None:
        self.locked.append(memory.nbytes)

    def unregister(self, memory: Any) -> None:
        self.locked.append(-memory.nbytes)


@pytest.fixture
def device() -> Iterator[Observed]:
    made = Observed()
    yield made
    if made.gate is not None:
        made.gate.set()


def warmed_up(device: Observed) -> CudaBackend:
    backend = CudaBackend(device, chunk_nbytes=1 << 20)
    backend.warm_up()
    return backend


def test_it_computes_by_every_kernel_and_with_page_locked_memory(device: Observed) -> None:
    assert warmed_up(device).self_test() > 2 * len(device.launched)
    assert device.launched == {each.symbol for each in every_kernel()}
    assert len(device.locked) == 2
    assert sum(device.locked) == 0


def test_its_shapes_make_blocks_wait_for_each_other() -> None:
    assert max(cut(Spec(FLOAT32, shape, 1)).tiles for shape in self_test.SHAPES) > 1


def test_a_gpu_that_computes_wrong_numbers_fails(device: Observed) -> None:
    device.has_bit_errors = True
    with pytest.raises(DeviceFailedError, match=r"emulated GPU failed its self-test: kernel \w+, .* is wrong: \w+ is "):
        warmed_up(device).self_test()


def test_a_kernel_that_never_ends_fails(device: Observed) -> None:
    device.gate = threading.Event()
    with pytest.raises(self_test.SelfTestError, match=r"did not end within 1 s$"):
        self_test.run(warmed_up(device), limit_s=1)


def probe(folder: Path) -> tuple[list[str], list[str]]:
    """What ``auto`` finds where CuPy is the strict stand-in."""
    command = [sys.executable, "-m", "bngrad_kernels.cuda.probe"]
    changed = os.environ | environment(library_file(), folder)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=changed)
    found = json.loads(done.stdout)
    return found["usable"], found["reasons"]


KERNEL = "first_float32_training_vectors"
FAILED = f"failed its self-test: kernel {KERNEL}, float32 (400, 64, 1) in training, "


@pytest.mark.parametrize(
    ("what", "content", "sentence"),
    [
        ("nothing is written", KERNEL, FAILED + "is wrong: x_backprop is NaN"),
        ("launch fails", KERNEL, FAILED + "failed: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
        (
            "nothing is copied on the device",
            "",
            "a copy ahead is wrong: float32 (1100, 64, 1) in training has other bits",
        ),
        ("memory", "2000000", "CuPy 14.2.0: the GPU has no 1048576 bytes left"),
        ("page-locked memory", "1000", "CuPy 14.2.0: the host has no 8192 bytes left that can be page-locked"),
    ],
)
def test_auto_does_not_use_a_gpu_that_fails_and_says_why(
    tmp_path: Path, what: str, content: str, sentence: str
) -> None:
    (tmp_path / what).write_text(content)
    usable, (reason,) = probe(tmp_path)
    assert usable == []
    assert reason.startswith("cuda:0: strict GPU, 8 GiB, compute capability 9.0, driver 12.9, CuPy 14.2.0")
    assert sentence in reason


def test_every_call_of_cupy_has_the_types_that_it_takes(tmp_path: Path) -> None:
    assert probe(tmp_path) == (["cuda:0"], [])
