"""The CUDA backend where memory is short, and copies that lie next to each other."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from tests.kernels.cuda.devices import EmulatedDevice
from tests.kernels.problems import assert_right, bits, first_order_problem, outputs, random_problem

from bngrad_kernels.cuda import host_memory
from bngrad_kernels.cuda.backend import STREAMS, CudaBackend
from bngrad_kernels.cuda.chunks.copy_plan import Copy
from bngrad_kernels.cuda.streams import CudaStream
from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import FLOAT16, FLOAT32, Spec


class Short(EmulatedDevice):
    """Has little memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.opened: list[Any] = []
        self.most_staging = 1 << 30
        self.refused = 0

    def free_nbytes(self) -> int:
        return self.nbytes - sum(int(stream.nbytes) for stream in self.opened)

    def stream(self) -> CudaStream:
        stream: Any = super().stream()
        reserve, staging = stream.reserve, stream.staging

        def reserve_if_there(nbytes: int) -> None:
            if nbytes <= stream.nbytes:
                return
            stream.release()
            if nbytes > self.free_nbytes():
                self.refused += 1
                raise MemoryError(f"no {nbytes} bytes left")
            reserve(nbytes)

        def stage_if_there(nbytes: int) -> Array:
            if nbytes > self.most_staging:
                self.refused += 1
                raise MemoryError(f"no {nbytes} bytes left that can be page-locked")
            staged: Array = staging(nbytes)
            return staged

        stream.reserve, stream.staging = reserve_if_there, stage_if_there
        self.opened.append(stream)
        made: CudaStream = stream
        return made


def backend(device: EmulatedDevice, **sizes: int) -> CudaBackend:
    made = CudaBackend(device, **sizes)
    made.warm_up()
    return made


@pytest.mark.parametrize("order", [1, 2])
def test_what_does_not_fit_is_computed_in_smaller_parts_with_the_same_bits(order: int) -> None:
    spec = Spec(FLOAT32, (64, 48, 20), 1, order=order)
    whole, in_parts = random_problem(spec), random_problem(spec)
    backend(EmulatedDevice()).run([whole])
    device = Short(450_000)
    short = backend(device, chunk_nbytes=100_000, stream_nbytes=1 << 30)
    short.run([in_parts])
    assert bits(whole) == bits(in_parts)
    assert short.free_streams == STREAMS


def test_where_page_locked_memory_is_short_a_batch_is_computed_in_parts() -> None:
    device = Short(1 << 30)
    short = backend(device)
    device.most_staging = 100_000
    batch = [first_order_problem(Spec(FLOAT32, (4, 24, 30), 1), seed) for seed in range(20)]  # 35 KB each
    short.run(batch)
    assert_right(*batch)
    assert device.refused


def test_idle_memory_is_given_back_for_a_request_that_needs_it() -> None:
    device = Short(1 << 20)
    short = backend(device, chunk_nbytes=300_000, stream_nbytes=1 << 30)
    made = first_order_problem(Spec(FLOAT32, (20_000, 1), 1))  # a channel, which cannot be cut
    short.run([made])
    assert_right(made)


def test_a_channel_that_does_not_fit_fails_alone() -> None:
    device = Short(1 << 20)
    short = backend(device, chunk_nbytes=300_000)
    with pytest.raises(MemoryError, match="bytes left"):
        short.run([first_order_problem(Spec(FLOAT32, (200_000, 1), 1))])
    assert short.free_streams == STREAMS
    made = first_order_problem(Spec(FLOAT32, (100, 64), 1))
    short.run([made])
    assert_right(made)


def test_beside_another_process_streams_start_with_less() -> None:
    device = Short(4 << 20)
    assert 0 < backend(device).used_nbytes <= 4 << 20
    assert device.refused


def test_the_most_memory_is_a_setting() -> None:
    device = Short(1 << 30)
    limited = backend(device, most_nbytes=3 << 20)
    assert limited.used_nbytes <= 3 << 20
    problem = first_order_problem(Spec(FLOAT16, (64, 64, 400), 1))  # 10 MB
    limited.run([problem])
    assert_right(problem)
    assert limited.used_nbytes <= 4 << 20  # tables come on top


def test_a_requests_tensors_side_by_side_are_copied_in_at_once() -> None:
    spec = Spec(FLOAT32, (100, 1000), 1)
    plain = first_order_problem(spec)
    memory = np.frombuffer(mmap.mmap(-1, 3 << 20), np.uint8)
    stride = -(-spec.tensor_nbytes // 256) * 256
    tensors = [memory[i * stride :][: spec.tensor_nbytes].view(np.float32).reshape(spec.shape) for i in range(3)]
    tensors[0][...], tensors[1][...] = plain.y_backprop, plain.x
    vectors = plain.scale, plain.reserve_space_1, plain.reserve_space_2
    sums = np.empty_like(plain.scale_backprop), np.empty_like(plain.offset_backprop)
    made = Problem(spec, tensors[0], tensors[1], *vectors, tensors[2], *sums)
    device = Counting()
    backend(device).run([plain])
    apart, device.copies = device.copies, 0
    backend(device).run([made])
    assert device.copies == apart - 1
    assert bits(made) == bits(plain)
    assert not any(np.isnan(output).any() for output in outputs(made))


class Counting(EmulatedDevice):
    """Counts copies."""

    copies = 0

    def stream(self) -> CudaStream:
        stream: Any = super().stream()
        copy_in = stream.copy_in

        def count(copy: Copy) -> None:
            self.copies += 1
            copy_in(copy)

        stream.copy_in = count
        made: CudaStream = stream
        return made


def test_memory_to_page_lock_is_provided_beforehand_and_keeps_its_content() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    memory[:] = 7
    host_memory.populate(memory, 0)
    assert (memory == 7).all()
    assert host_memory.populate(memory[1:], None) is False  # not a whole number of pages
    assert host_memory.node_of("0000:ff:1f.7") is None
