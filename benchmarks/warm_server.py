"""A server for measurements."""

from __future__ import annotations

import os

from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.cpu.machine_code import warm
from bngrad_kernels.cpu.machine_code.kernels import host


class WarmServer(EmbeddedServer):
    """An `EmbeddedServer` whose kernels are compiled before it starts: it would compute in NumPy meanwhile."""

    def __enter__(self) -> WarmServer:
        if self.device == "cpu":
            _compile()
        super().__enter__()
        return self


def _compile() -> None:
    compiled = warm.fill(host(), warm.missing(host()), len(os.sched_getaffinity(0)))
    if failures := [failure for _, failure in compiled if failure]:
        raise RuntimeError("; ".join(failures))
