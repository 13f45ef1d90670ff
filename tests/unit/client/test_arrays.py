"""Tensors of other libraries as NumPy arrays."""

from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import torch

import bngrad
from bngrad._requests.arrays import as_array, as_arrays, as_output

VALUES = np.array([[1, -2.5], [0.125, 3]], np.float32)


class WithDlpackAlone:
    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class WithArrayAlone:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return VALUES


@pytest.mark.parametrize(
    "value",
    [VALUES, torch.from_numpy(VALUES), WithDlpackAlone(VALUES), WithArrayAlone()],
    ids=["numpy", "torch", "dlpack", "__array__"],
)
def test_memory_that_the_cpu_can_read_is_not_copied(value: Any) -> None:
    array = as_array("x", value)
    np.testing.assert_array_equal(array, VALUES)
    assert np.shares_memory(array, VALUES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_torch_tensors_keep_dtype_and_values(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(VALUES).to(dtype)
    variants = [tensor, tensor.clone().requires_grad_(), torch.nn.Parameter(tensor), tensor.t().contiguous().t()]
    for variant in variants:
        array = as_array("x", variant)
        assert array.dtype.name == str(dtype).removeprefix("torch.")
        np.testing.assert_array_equal(array.astype(np.float32), VALUES)


def test_torchs_lazily_negated_tensors_are_negated() -> None:
    imaginary = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
    assert imaginary.is_neg()
    np.testing.assert_array_equal(as_array("x", imaginary), -np.ones(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensorflows_tensors_and_variables_keep_dtype_and_values(dtype: str) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    tensor = tensorflow.constant(VALUES, dtype)
    for variant in (tensor, tensorflow.Variable(tensor)):
        array = as_array("x", variant)
        assert array.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        np.testing.assert_array_equal(array.astype(np.float32), VALUES)


@pytest.mark.parametrize("value", [[[1, -2.5], [0.125, 3]], ((1, -2.5), (0.125, 3)), [list(VALUES[0]), VALUES[1]]])
def test_python_sequences_become_float32(value: Any) -> None:
    array = as_array("x", value)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, VALUES)


def test_numpy_arrays_keep_their_dtype() -> None:
    assert as_array("x", np.ones(3)).dtype == np.float64


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (
            WithDlpackAlone(VALUES, (2, 1)),
            r"must be in the CPU's memory, but the .*WithDlpackAlone is on device 1 of DLPack type 2: copy it first",
        ),
        (
            torch.empty(3, device="meta"),
            "must be in the CPU's memory, but the torch.Tensor is on device meta: copy it first",
        ),
        (torch.eye(3).to_sparse(), "must be an array, but converting the torch.Tensor failed: "),
        ([[1, 2], [3]], "must be an array, but converting the list failed: "),
        (np.ma.masked_equal([1, 2, 3], 2), "must have no masked elements, but has 1: fill them first"),
    ],
    ids=["dlpack", "torch", "sparse", "ragged", "masked"],
)
def test_an_unreadable_argument_is_named(value: Any, complaint: str) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match=f"reserve_space_1 {complaint}") as refused:
        as_array("reserve_space_1", value)
    assert [violation.field for violation in refused.value.violations] == ["reserve_space_1"]


def test_device_arrays_that_would_be_copied_silently_are_refused() -> None:
    class NumbaLike(WithArrayAlone):
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    with pytest.raises(bngrad.InvalidArgumentError, match="NumbaLike is on a CUDA device"):
        as_array("x", NumbaLike())


def test_every_wrong_argument_is_named_at_once() -> None:
    meta = torch.empty(3, device="meta")
    with pytest.raises(bngrad.InvalidArgumentError) as refused:
        as_arrays({"x": meta, "scale": VALUES, "reserve_space_1": meta})
    assert [violation.field for violation in refused.value.violations] == ["x", "reserve_space_1"]


def test_an_output_with_masked_elements_is_refused_and_one_without_is_taken() -> None:
    out = np.ma.masked_equal(np.array([1, 2, 2], np.float32), 2)
    complaint = r"^out must have no masked elements, but has 2: unmask them first$"
    with pytest.raises(bngrad.InvalidArgumentError, match=complaint) as refused:
        as_output("out", out)
    assert [violation.field for violation in refused.value.violations] == ["out"]
    out.mask = False
    assert as_output("out", out) is out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_are_written_to_torch_tensors(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    view = as_output("out", tensor)
    assert view is not None
    view[:] = 2.5
    assert tensor.tolist() == [[2.5] * 3] * 2


def test_outputs_that_cannot_be_written_are_refused() -> None:
    for tensor, complaint in [
        (torch.zeros(3, requires_grad=True), "must neither require a gradient nor be a negated view, but requires one"),
        (torch.complex(torch.zeros(3), torch.ones(3)).conj().imag, "must neither require .* but is"),
        (torch.empty(3, device="meta"), "must be in the CPU's memory, but the torch.Tensor is on device meta"),
    ]:
        with pytest.raises(bngrad.InvalidArgumentError, match=f"out {complaint}"):
            as_output("out", tensor)
    with pytest.raises(TypeError, match="out must be a NumPy array or a PyTorch tensor, not list"):
        as_output("out", [1.0])
