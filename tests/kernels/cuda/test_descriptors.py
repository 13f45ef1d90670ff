from __future__ import annotations

import itertools

import numpy as np
from tests.kernels.cuda.devices import library

from bngrad_kernels.cuda.descriptors import (
    APPLY,
    DESCRIPTOR,
    DESCRIPTOR_INDEX,
    GROUP,
    INFER,
    PHASE,
    RESIDE,
    SUM,
    TILE,
    WORK_TILE,
    schedule_tiles,
    template,
)
from bngrad_kernels.cuda.kernel_selection import Traits, lookahead
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import FLOAT16, FLOAT32, Spec

TRAITS = Traits(processors=132, shared_nbytes=0, cache_nbytes=50 << 20)  # nothing is resident
SPECS = [
    Spec(FLOAT32, (20_000, 256), 1), Spec(FLOAT32, (7, 33, 40), 1), Spec(FLOAT32, (100_000, 8), 1),
    Spec(FLOAT32, (5, 4), 1), Spec(FLOAT32, (0, 4), 1),
]  # fmt: skip


def drawn(*specs: Spec) -> Array:
    templates = [template(spec, spec.channels, TRAITS) for spec in specs]
    return schedule_tiles(templates, range(len(specs)), TRAITS.cache_nbytes)


def test_the_structures_are_as_large_as_the_compilers() -> None:
    assert library().descriptor_nbytes() == DESCRIPTOR.itemsize
    assert library().work_tile_nbytes() == 4 * len(WORK_TILE)


def test_every_tile_is_summed_once_and_applied_once_after_all_sums_of_its_group() -> None:
    summed: dict[tuple[int, int], set[int]] = {}
    applied: dict[tuple[int, int], set[int]] = {}
    tiles = [template(spec, spec.channels, TRAITS).cut.tiles for spec in SPECS]
    for work_tile in drawn(*SPECS):
        descriptor, group, tile = int(work_tile[DESCRIPTOR_INDEX]), int(work_tile[GROUP]), int(work_tile[TILE])
        done = {SUM: summed, APPLY: applied}[int(work_tile[PHASE])].setdefault((descriptor, group), set())
        assert tile not in done
        done.add(tile)
        if work_tile[PHASE] == APPLY:
            assert summed[descriptor, group] == set(range(tiles[descriptor]))
    groups = {(i, group) for i, spec in enumerate(SPECS)
              for group in range(template(spec, spec.channels, TRAITS).groups)}  # fmt: skip
    assert summed.keys() == groups
    assert applied.keys() == {(i, group) for i, group in groups if SPECS[i].shape[0]}
    assert all(applied[key] == summed[key] for key in applied)


def test_a_group_with_long_rows_is_applied_soon_after_it_is_summed_and_backwards() -> None:
    spec = Spec(FLOAT16, (32, 64, 112 * 112), 1)
    table = drawn(spec)
    made = template(spec, spec.channels, TRAITS)
    tiles = made.cut.tiles
    first = table[table[:, GROUP] == 0]
    assert first[:, TILE].tolist() == [*range(tiles), *reversed(range(tiles))]
    between = np.flatnonzero(table[:, GROUP] == 0)[tiles] - tiles
    ahead = lookahead(made.group_nbytes, TRAITS.cache_nbytes) / made.group_nbytes
    assert ahead - 1 < between / tiles < ahead + 1  # other groups are summed meanwhile, as far as the cache has room


def test_groups_with_short_rows_take_turns_by_halves_and_are_applied_once_all_are_summed() -> None:
    spec = Spec(FLOAT16, (100_352, 512), 1)
    table = drawn(spec)
    made = template(spec, spec.channels, TRAITS)
    assert made.groups == 4
    sums, applies = np.split(table, 2)
    assert set(sums[:, PHASE]) == {SUM}
    half = made.cut.tiles * 2
    assert sums[:half, GROUP].tolist() == [0, 1] * made.cut.tiles
    assert sums[half:, GROUP].tolist() == [2, 3] * made.cut.tiles
    assert applies[:, GROUP].tolist() == sums[:, GROUP].tolist()
    assert applies[:half, TILE].tolist() == sums[:half, TILE].tolist()[::-1]


def test_inference_takes_one_pass() -> None:
    table = drawn(Spec(FLOAT32, (1000, 64), 1, is_training=False))
    assert set(table[:, PHASE]) == {INFER}
    assert len(set(itertools.zip_longest(table[:, GROUP], table[:, TILE]))) == len(table)


def test_a_resident_group_is_one_work_tile() -> None:
    spec = Spec(FLOAT32, (49, 256), 1)
    made = template(spec, spec.channels, TRAITS._replace(shared_nbytes=227 << 10))
    assert made.kernel.symbol == "first_float32_training_resident"
    assert made.work_tiles[:, GROUP].tolist() == list(range(made.groups))
    assert set(made.work_tiles[:, PHASE]) == {RESIDE}
    assert made.resident_nbytes == 2 * 49 * made.cut.group_channels * 4
