from __future__ import annotations

import numpy as np
import pytest
from tests.kernels.problems import DTYPES

from bngrad_kernels.problem import Array, address_of_array


def read_only(array: Array) -> Array:
    view = array[1:]
    view.flags.writeable = False
    return view


ARRAYS = {
    **{str(dtype): np.empty((2, 3), dtype) for dtype in DTYPES},
    "scalar": np.array(1.0),
    "empty": np.empty((2, 0)),
    "read-only": read_only(np.arange(6)),
    "backwards": np.arange(6)[::-1],
    "foreign memory": np.frombuffer(b"bytes", np.uint8, offset=1),
    "subclass": np.ma.masked_array([1, 2]),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_address_is_numpys(array: Array) -> None:
    assert address_of_array(array) == array.ctypes.data
