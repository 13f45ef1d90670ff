"""``python -m tests.kernels.cuda.races LIBRARY`` runs kernels that were compiled for ThreadSanitizer."""

from __future__ import annotations

import ctypes
import sys

from tests.kernels.cuda.devices import TRAITS, EmulatedDevice
from tests.kernels.problems import assert_right, random_problem

from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.spec import FLOAT32, Spec


def main() -> None:
    kernels = ctypes.CDLL(sys.argv[1])
    for spec, shared_nbytes in (
        (Spec(FLOAT32, (1000, 64), 1), 0),
        (Spec(FLOAT32, (4700, 64), 1, is_training=False), 0),  # several sections
        (Spec(FLOAT32, (20, 6, 49), 1, is_training=False), 0),
        (Spec(FLOAT32, (9, 3, 600), 1), 1 << 20),
        (Spec(FLOAT32, (70, 32), 1), 1 << 20),
        (Spec(FLOAT32, (70, 32), 1, order=2), 0),
        (Spec(FLOAT32, (3, 2, 600), 1, order=2, is_training=False), 0),
    ):
        traits = TRAITS._replace(shared_nbytes=shared_nbytes)
        backend = CudaBackend(EmulatedDevice(blocks=4, os_threads=3, kernels=kernels, traits=traits))
        backend.warm_up()
        problem = random_problem(spec)
        backend.run([problem])
        assert_right(problem)


if __name__ == "__main__":
    main()
