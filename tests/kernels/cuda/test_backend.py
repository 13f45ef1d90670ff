"""The CUDA backend around the kernels: chunks, streams, threads, failures."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.kernels.cuda.devices import EmulatedDevice
from tests.kernels.problems import assert_right, bits, first_order_problem, outputs

from bngrad_kernels.cuda.backend import STREAMS, CudaBackend
from bngrad_kernels.cuda.chunks.copy_plan import Copy
from bngrad_kernels.cuda.chunks.layout import Launch
from bngrad_kernels.cuda.kernel_selection import KernelKind
from bngrad_kernels.cuda.streams import CudaStream
from bngrad_kernels.errors import DeviceFailedError, DeviceUnavailableError
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

MANY = [Spec(dtype, (n, 24, 30), 1, is_training=n % 3 > 0) for n, dtype in enumerate([FLOAT32, FLOAT16, BFLOAT16] * 9)]


class Recorder(EmulatedDevice):
    """Records the calls of its streams, and fails on request."""

    errors: tuple[type[Exception], ...] = (ArithmeticError,)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.kinds: list[KernelKind] = []
        self.failure: Exception | None = None
        self.busy: list[RecordedStream] = []
        self.opened: list[RecordedStream] = []

    def stream(self) -> CudaStream:
        stream = RecordedStream(self, super().stream())
        self.opened.append(stream)
        return stream

    def unregister(self, memory: np.ndarray[Any, Any]) -> None:
        if self.failure:
            raise self.failure


class RecordedStream:
    def __init__(self, device: Recorder, stream: CudaStream) -> None:
        self._device, self._stream = device, stream
        self.reserve, self.release, self.staging = stream.reserve, stream.release, stream.staging

    @property
    def address(self) -> int:
        return self._stream.address

    @property
    def nbytes(self) -> int:
        return self._stream.nbytes

    def copy_in(self, copy: Copy) -> None:
        self._record("in", copy.rows.size)
        if self not in self._device.busy:
            self._device.busy.append(self)
        self._stream.copy_in(copy)

    def copy_out(self, copy: Copy) -> None:
        self._record("out", copy.rows.size)
        self._stream.copy_out(copy)

    def launch(self, launch: Launch, descriptors: int) -> None:
        self._record("launch", launch.tile_count)
        self._device.kinds.append(launch.kernel.kind)
        if self._device.failure:
            raise self._device.failure
        self._stream.launch(launch, descriptors)

    def wait(self) -> None:
        if isinstance(self._device.failure, ArithmeticError):
            raise self._device.failure  # in a broken context every call fails
        self._stream.wait()
        if self in self._device.busy:
            self._device.busy.remove(self)

    def _record(self, call: str, number: int) -> None:
        self._device.calls.append((call, number))


@pytest.fixture
def device() -> Recorder:
    return Recorder()


def backend(device: Recorder, **sizes: int) -> CudaBackend:
    made = CudaBackend(device, **sizes)
    made.warm_up()
    return made


def test_a_batch_of_small_problems_takes_one_copy_in_one_launch_and_one_copy_out(device: Recorder) -> None:
    batch = [first_order_problem(Spec(FLOAT32, (4, size, size, 24), 3), seed=size) for size in range(1, 9)]
    backend(device).run(batch)
    assert [call for call, _ in device.calls] == ["in", "launch", "out"]
    assert_right(*batch)


def test_small_and_large_problems_of_a_kind_take_one_launch(device: Recorder) -> None:
    batch = [first_order_problem(Spec(FLOAT32, (rows, 64), 1)) for rows in (10, 20_000, 300)]
    for alone in batch:
        backend(device).run([alone])
    kinds = device.kinds[:]
    expected = [bits(made) for made in batch]
    device.kinds.clear()
    backend(device).run(batch)
    assert kinds == [KernelKind.RESIDENT, KernelKind.STREAMED, KernelKind.STREAMED]
    assert device.kinds == [KernelKind.STREAMED]
    assert [bits(made) for made in batch] == expected


def test_large_tensors_are_copied_from_and_to_where_they_are(device: Recorder) -> None:
    made = first_order_problem(Spec(FLOAT32, (100, 1000), 1))
    backend(device).run([made])
    assert [call for call, _ in device.calls] == ["in", "in", "in", "launch", "out", "out"]
    assert [number for _, number in device.calls].count(made.x.nbytes) == 3
    assert_right(made)


def test_problems_of_several_kernels_share_the_copies(device: Recorder) -> None:
    specs = [Spec(dtype, (4, 8), 1, is_training=mode) for dtype in (FLOAT32, FLOAT16) for mode in (True, False)]
    batch = [first_order_problem(spec) for spec in [*specs, *specs]]
    backend(device).run(batch)
    assert [call for call, _ in device.calls] == ["in", *["launch"] * 4, "out"]
    assert_right(*batch)


def test_chunks_take_turns_on_the_streams(device: Recorder) -> None:
    batch = [first_order_problem(spec) for spec in MANY]
    backend(device, chunk_nbytes=100_000).run(batch)
    assert len(device.opened) == STREAMS
    assert not device.busy
    assert_right(*batch)


def test_batches_of_several_threads_do_not_meet(device: Recorder) -> None:
    shared = backend(device, chunk_nbytes=100_000)
    batches = [[first_order_problem(spec, seed) for spec in MANY] for seed in range(6)]
    threads = [threading.Thread(target=shared.run, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for batch in batches:
        assert_right(*batch)


def test_the_memory_in_use_is_that_of_all_streams_and_grows_with_what_does_not_fit() -> None:
    backend = CudaBackend(EmulatedDevice(), chunk_nbytes=1000)
    assert backend.used_nbytes == 0
    backend.warm_up()
    assert backend.used_nbytes == 1000 * STREAMS
    backend.run([first_order_problem(Spec(FLOAT32, (4, 24, 30), 1))])
    assert backend.used_nbytes > 1000 * STREAMS


def test_what_was_prepared_for_one_device_is_not_used_on_another() -> None:
    made = first_order_problem(Spec(FLOAT32, (10, 64), 1))
    first, second = Recorder(), Recorder()
    second.traits = second.traits._replace(shared_nbytes=0)
    for device in (first, second, first):
        backend(device).run([made])
    assert (first.kinds, second.kinds) == ([KernelKind.RESIDENT] * 2, [KernelKind.STREAMED])


def test_a_failed_device_is_told_from_a_failed_batch(device: Recorder) -> None:
    shared = backend(device, chunk_nbytes=100_000)
    device.failure = ArithmeticError("an illegal address")
    for _ in range(STREAMS + 1):  # a failure keeps no stream
        with pytest.raises(DeviceFailedError, match="an illegal address"):
            shared.run([first_order_problem(spec) for spec in MANY])
    with pytest.raises(DeviceFailedError, match="an illegal address"):
        shared.unregister(np.zeros(1, np.uint8))
    device.busy.clear()
    device.failure = MemoryError("no bytes left")
    with pytest.raises(MemoryError, match="no bytes left"):
        shared.run([first_order_problem(spec) for spec in MANY])
    assert not device.busy  # nothing is written after the failure
    device.failure = None
    again = [first_order_problem(spec) for spec in MANY]
    shared.run(again)
    assert_right(*again)


class Unusable(Recorder):
    """Fails while it is warmed up."""

    def __init__(self, *, is_full: bool) -> None:
        super().__init__()
        self._is_full = is_full

    def warm_up(self) -> None:
        if not self._is_full:
            raise ArithmeticError("no kernel image is available")

    def stream(self) -> CudaStream:
        stream: Any = super().stream()

        def reserve(nbytes: int) -> None:
            raise MemoryError(f"no {nbytes} bytes left")

        stream.reserve = reserve
        made: CudaStream = stream
        return made


def test_a_device_that_cannot_be_warmed_up_says_why() -> None:
    with pytest.raises(DeviceFailedError, match="failed: no kernel image is available"):
        backend(Unusable(is_full=False))
    with pytest.raises(DeviceUnavailableError, match="no 786432 bytes left"):
        backend(Unusable(is_full=True))


def test_a_batch_that_cannot_be_prepared_keeps_no_stream(device: Recorder) -> None:
    shared = backend(device)
    broken = first_order_problem(Spec(FLOAT32, (10, 64), 1))
    broken.x, broken.channels = broken.x[:1], range(8)
    for _ in range(STREAMS + 1):
        assert shared.free_streams == STREAMS
        with pytest.raises(ValueError, match="reshape"):
            shared.run([broken])
    made = first_order_problem(Spec(FLOAT32, (10, 64), 1))
    shared.run([made])
    assert_right(made)


def test_pieces_of_one_problem_do_not_touch_each_others_outputs() -> None:
    shared = CudaBackend(EmulatedDevice(), stream_nbytes=1, chunk_nbytes=1)
    shared.warm_up()
    whole, cut = (first_order_problem(Spec(BFLOAT16, (5, 13, 3), 1, stats_dtype=BFLOAT16)) for _ in range(2))
    backend(Recorder()).run([whole])
    shared.run([cut])
    assert bits(whole) == bits(cut)
    assert not any(np.isnan(output.astype(np.float32)).any() for output in outputs(cut))
