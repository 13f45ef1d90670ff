"""The interface of a backend: what computes problems on one device. `cpu` and `cuda` implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bngrad_kernels.problem import AnyProblem, Array


class Backend(Protocol):
    """Computes problems on one device. `bngrad_kernels.backends` creates one by the name of its device."""

    description: str
    """The device, in its vendor's words."""
    memory_nbytes: int
    """The size of the device's own memory; 0 if it computes in the host's."""

    @property
    def used_nbytes(self) -> int:
        """How much of the device's own memory the backend has allocated. Thread-safe."""

    def register(self, memory: Array) -> None:
        """Prepares host memory that problems will use, so that the device reaches it as fast as possible."""

    def unregister(self, memory: Array) -> None:
        """Undoes `register`. Must be called before the memory is freed."""

    def copy_ahead(self, memory: Array) -> Any | None:
        """Begins to copy a large input to the device before there is a problem that needs it.

        Thread-safe. The memory is read until the copy is done, and must stay registered until then.

        Returns:
            The copy, which lasts until nothing refers to it, for `bngrad_kernels.problem.Problem.on_device`; None where
            none would help, as by default.

        Raises:
            MemoryError: There is no room for it.
            DeviceFailedError: This process can no longer use the device.
        """
        return None

    def finish_copy(self, copy: Any) -> None:
        """Waits until a copy that `copy_ahead` began is done, and reads the host's memory no longer.

        Raises:
            DeviceFailedError: This process can no longer use the device.
        """
        return

    def warm_up(self) -> None:
        """Compiles every kernel, or loads it from the disk cache, so that no request waits for that."""

    def self_test(self, *, is_long: bool = False) -> int:
        """Checks the device by small problems, by large ones too if ``is_long``, and returns how many; 0 by default.

        Raises:
            DeviceFailedError: The device computes wrong results, fails, or hangs.
        """
        return 0

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem. The bits depend on each problem alone, not on the rest of the batch.

        Raises:
            DeviceFailedError: This process can no longer use the device.
        """
