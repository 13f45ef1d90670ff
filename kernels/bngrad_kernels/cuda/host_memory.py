"""Prepares host memory to be page-locked: the system provides it piece by piece, near the GPU."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

from bngrad_kernels.problem import Array

_PIECE_NBYTES = 1 << 30
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, for which the C library has no function."""
_PREFERRED = 1  # MPOL_PREFERRED
_MOST_NODES = 1024
_libc = ctypes.CDLL(None)


def node_of(pci_bus_id: str) -> int | None:
    """The NUMA node of a device on the PCI bus; None if the system names none."""
    try:
        node = int(Path(f"/sys/bus/pci/devices/{pci_bus_id.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MOST_NODES else None


def populate(memory: Array, node: int | None) -> bool:
    """Has the system provide memory, preferably of a NUMA node, and returns whether it did.

    Page-locking would do that too, but in one call, during which no other thread of the process may run. Where the
    kernel is older, or forbids it, nothing is lost but that.
    """
    start, nbytes = memory.ctypes.data, memory.nbytes
    if start % mmap.PAGESIZE:
        return False
    number = _MBIND.get(platform.machine())
    if node is not None and number is not None:
        nodes = (ctypes.c_uint64 * (_MOST_NODES // 64))()
        nodes[node // 64] = 1 << node % 64
        _libc.syscall(
            ctypes.c_long(number), ctypes.c_void_p(start), ctypes.c_size_t(nbytes), ctypes.c_int(_PREFERRED), nodes,
            ctypes.c_ulong(_MOST_NODES), ctypes.c_uint(0),
        )  # fmt: skip
    for offset in range(0, nbytes, _PIECE_NBYTES):
        piece = ctypes.c_size_t(min(_PIECE_NBYTES, nbytes - offset))
        if _libc.madvise(ctypes.c_void_p(start + offset), piece, ctypes.c_int(_POPULATE_WRITE)):
            return False
    return True
