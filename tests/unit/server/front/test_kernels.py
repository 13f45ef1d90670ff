"""The kernels of the front process."""

from __future__ import annotations

import threading

from tests.servers import wait_until

from bngrad_kernels import backends
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_server.front.kernels import FrontKernels

SPEC = Spec(FLOAT32, (2, 3, 5, 7), 3)


def test_without_a_thread_to_load_a_kernel_it_is_loaded_later() -> None:
    backends.create("cpu", threads=1).warm_up()  # has the kernel in the cache
    kernels = FrontKernels(threads=1)
    threading.stack_size(1 << 47)  # more than a process can address, so no thread starts
    try:
        assert not kernels.has(SPEC)
    finally:
        threading.stack_size(0)
    wait_until(lambda: kernels.has(SPEC))
