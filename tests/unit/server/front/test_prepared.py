"""What a prepared request reads, and what its response holds, by the way that its tensors of the shape of x travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bngrad_kernels.problem import Array
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS, Op
from bngrad_server.codec.request_reader import RequestReader
from bngrad_server.front.prepared import Prepared, aligned_memory
from bngrad_server.memory.layout import ALIGNMENT, ARENA, Place

SHAPE, STATS_SHAPE = (2, 3, 5, 7), (7,)
STRIDE = 4 * ALIGNMENT
"""From one tensor of the shape of x to the next, in the shared region."""
REGION = 1
KEY = bytes(16)


class Call:
    """A request of an op, prepared in memory of its own."""

    def __init__(self, op: Op, way: str, without: str = "", seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        names = [name for name in op.large_inputs + op.small_inputs if name != without]
        shapes = {name: SHAPE if name in op.large_inputs else STATS_SHAPE for name in names}
        self.op = op
        self.inputs = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        self.elements = [self.inputs[name].data.cast("B") for name in op.large_inputs] if way == "stream" else []
        self.message = self._message(way)
        request = RequestReader(op, chunked=way == "stream").read(self.message)
        sizes, count = request.sizes, request.tensor_count
        self.arena, self.region = aligned_memory(sizes.all_stats + count * sizes.tensor), aligned_memory(count * STRIDE)
        if way == "shared":
            places = [Place(REGION, i * STRIDE) for i in range(count)]
        else:
            places = [Place(ARENA, sizes.all_stats + i * sizes.tensor) for i in range(count)]
        self.request = request
        self.prepared = Prepared(request, places, {ARENA: self.arena, REGION: self.region})

    def _message(self, way: str) -> bytes:
        message: Any = self.op.request_type()
        for name, array in self.inputs.items():
            tensor = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=array.shape)
            if array.shape == STATS_SHAPE or way == "unary":
                tensor.data = array.tobytes()
            elif way == "shared":
                location = pb.Location(region_key=KEY, offset=self.op.large_inputs.index(name) * STRIDE)
                tensor.location.CopyFrom(location)
            getattr(message, name).CopyFrom(tensor)
        if way == "shared":
            for i, name in enumerate(self.op.locations, len(self.op.large_inputs)):
                getattr(message, name).CopyFrom(pb.Location(region_key=KEY, offset=i * STRIDE))
        if self.op.name == "BatchNormTrainingBackprop":  # which has no default
            message.epsilon = 1e-3
        return bytes(message.SerializeToString())

    def problem_inputs(self) -> dict[str, Array | None]:
        """The arrays to compute with, by the names that the op gives them."""
        problem = self.prepared.problem
        names = zip(
            self.op.large_inputs + self.op.small_inputs, problem.large_inputs + problem.small_inputs, strict=True
        )
        return {name: getattr(problem, own_name) for name, own_name in names}

    def compute(self, seed: int) -> list[bytes]:
        """Writes other elements to each output, and returns them: those of the shape of x, then the 1-D ones."""
        problem, rng = self.prepared.problem, np.random.default_rng(seed)
        outputs = [getattr(problem, name) for name in problem.large_outputs + problem.small_outputs]
        for output in outputs:
            output[...] = rng.standard_normal(output.shape, np.float32)
        return [output.tobytes() for output in outputs]


def tensors_of(response: Any) -> list[pb.Tensor]:
    """The outputs of a response, in the problem's order."""
    return [tensor for _, tensor in response.ListFields()]


OF_EACH_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def test_it_keeps_its_request_whose_id_no_other_may_get() -> None:
    call = Call(OPS[0], "unary")
    assert call.prepared.request is call.request


@OF_EACH_OP
@pytest.mark.parametrize("way", ["unary", "stream"])
def test_inputs_that_arrive_are_copied_to_their_places(op: Op, way: str) -> None:
    call = Call(op, way)
    other = Call(op, way, seed=1)
    for each in (other, call):  # the message of another request of the same layout does as well
        call.prepared.copy_in(each.message, each.elements)
        assert call.problem_inputs().keys() == each.inputs.keys()
        for name, array in call.problem_inputs().items():
            assert np.array_equal(array, each.inputs[name]), name  # type: ignore[arg-type]


@OF_EACH_OP
def test_inputs_in_shared_memory_stay_as_they_are(op: Op) -> None:
    call = Call(op, "shared")
    before = {name: np.full(SHAPE, number, np.float32) for number, name in enumerate(op.large_inputs, 1)}
    for number, filled in enumerate(before.values()):
        call.region[number * STRIDE :][: filled.nbytes] = filled.tobytes()
    call.prepared.copy_in(call.message)
    for name, array in call.problem_inputs().items():
        assert np.array_equal(array, before.get(name, call.inputs[name])), name  # type: ignore[arg-type]


def test_a_scale_that_is_left_out_stands_for_ones() -> None:
    (op,) = (op for op in OPS if op.name == "BatchNormTrainingBackprop")
    call = Call(op, "unary", without="gamma")
    call.prepared.copy_in(call.message)
    inputs = call.problem_inputs()
    assert inputs.pop("gamma") is None
    assert all(np.array_equal(array, call.inputs[name]) for name, array in inputs.items())  # type: ignore[arg-type]


@OF_EACH_OP
def test_the_response_to_a_whole_request_holds_all_outputs(op: Op) -> None:
    call = Call(op, "unary")
    for seed in range(2):
        outputs = call.compute(seed)
        (message,) = call.prepared.response()
        assert [tensor.data for tensor in tensors_of(op.response_type.FromString(message))][: len(outputs)] == outputs


@OF_EACH_OP
def test_the_response_to_chunks_has_the_outputs_of_the_shape_of_x_in_chunks(op: Op) -> None:
    call = Call(op, "stream")
    count = len(call.prepared.problem.large_outputs)
    for seed in range(2):
        outputs = call.compute(seed)
        first, *chunks = map(pb.ExchangeResponse.FromString, call.prepared.response())
        response = getattr(first, first.WhichOneof("part") or "")
        assert isinstance(response, op.response_type)
        assert [tensor.data for tensor in tensors_of(response)][: len(outputs)] == [*[b""] * count, *outputs[count:]]
        assert [chunk.chunk for chunk in chunks] == outputs[:count]


@OF_EACH_OP
def test_outputs_in_shared_memory_are_written_there_and_the_response_says_where(op: Op) -> None:
    call = Call(op, "shared")
    large, count = len(op.large_inputs), len(op.locations)
    outputs = call.compute(0)
    (message,) = call.prepared.response()
    tensors = tensors_of(op.response_type.FromString(message))
    assert [tensor.data for tensor in tensors][: len(outputs)] == [*[b""] * count, *outputs[count:]]
    places = [i * STRIDE for i in range(large, large + count)]
    assert [tensor.location.offset for tensor in tensors[:count]] == places
    assert [bytes(call.region[place:][: len(output)]) for place, output in zip(places, outputs, strict=False)] == (
        outputs[:count]
    )


@pytest.mark.parametrize("nbytes", [0, 1, ALIGNMENT, 5 * ALIGNMENT + 1])
def test_memory_is_aligned_and_has_its_size(nbytes: int) -> None:
    for _ in range(16):
        memory = aligned_memory(nbytes)
        assert memory.nbytes == nbytes
        assert np.frombuffer(memory, np.uint8).ctypes.data % ALIGNMENT == 0 or nbytes == 0
