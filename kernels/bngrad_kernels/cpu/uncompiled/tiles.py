"""The tiles of the compiled kernels, see `plan`, and the orders in which they add up what a tile has."""

from __future__ import annotations

import numpy as np

from bngrad_kernels.cpu.plan import Geometry
from bngrad_kernels.cpu.uncompiled.arithmetic import Float64Array, add_in_order
from bngrad_kernels.problem import Array


def planes_of(cut: Geometry, tile: int) -> tuple[range, range]:
    """The planes of a tile, and the elements of each."""
    outer, inner = divmod(tile, cut.inner_tiles)
    return (
        range(outer * cut.outer // cut.outer_tiles, (outer + 1) * cut.outer // cut.outer_tiles),
        range(inner * cut.inner // cut.inner_tiles, (inner + 1) * cut.inner // cut.inner_tiles),
    )


def rows_of(cut: Geometry, tile: int) -> range:
    """The rows of a tile of the columns kernel, of which the last one of all may be shorter."""
    return range(tile * cut.rows // cut.tiles, (tile + 1) * cut.rows // cut.tiles)


def over_tiles(sums: Float64Array) -> Float64Array:
    """The sums over the first axis, in the order of the tiles."""
    return add_in_order(sums[0], sums[1:])


def over_columns(sums: Float64Array) -> Float64Array:
    """The sums of channels from those of their columns: from (fold, channels, inner) to (channels,)."""
    channels = sums.shape[1]
    return add_in_order(np.zeros(channels), sums.swapaxes(1, 2).reshape(-1, channels))


def over_lanes(sums: Float64Array) -> Float64Array:
    """The sums over the last axis, by halves."""
    while (half := sums.shape[-1] // 2) > 0:
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def column(per_channel: Array) -> Array:
    """From (channels,) to (channels, 1)."""
    return per_channel[:, np.newaxis]
