from __future__ import annotations

import itertools

import numpy as np
from tests.unit.kernels.cuda.devices import library

from bngrad_kernels.cuda.descriptors import (
    APPLY,
    DESCRIPTOR,
    GROUP,
    INFER,
    PHASE,
    PIECE,
    RESIDE,
    STRIP,
    SUM,
    TICKET,
    Piece,
    template,
    tickets,
)
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import FLOAT16, FLOAT32, Spec

TRAITS = Traits(processors=132, shared_nbytes=0, cache_nbytes=50 << 20)  # nothing is resident
SPECS = [
    Spec(FLOAT32, (20_000, 256), 1), Spec(FLOAT32, (7, 33, 40), 1), Spec(FLOAT32, (100_000, 8), 1),
    Spec(FLOAT32, (5, 4), 1), Spec(FLOAT32, (0, 4), 1),
]  # fmt: skip


def whole(spec: Spec) -> Piece:
    """A piece whose numbers do not matter."""
    tensor, stats = np.empty(spec.shape, spec.dtype), np.empty(spec.channels, np.float32)
    return Piece(Problem.allocate(spec, tensor, tensor, None, stats, stats), 0, spec.channels)


def drawn(*specs: Spec) -> Array:
    templates = [template(whole(spec), TRAITS) for spec in specs]
    return tickets(templates, range(len(specs)), TRAITS.cache_nbytes)


def test_the_structures_are_as_large_as_the_compilers() -> None:
    assert library().descriptor_nbytes() == DESCRIPTOR.itemsize
    assert library().ticket_nbytes() == 4 * len(TICKET)


def test_every_strip_is_summed_once_and_applied_once_behind_all_sums_of_its_group() -> None:
    summed: dict[tuple[int, int], set[int]] = {}
    applied: dict[tuple[int, int], set[int]] = {}
    strips = [template(whole(spec), TRAITS).cut.strips for spec in SPECS]
    for ticket in drawn(*SPECS):
        descriptor, group, strip = int(ticket[PIECE]), int(ticket[GROUP]), int(ticket[STRIP])
        done = {SUM: summed, APPLY: applied}[int(ticket[PHASE])].setdefault((descriptor, group), set())
        assert strip not in done
        done.add(strip)
        if ticket[PHASE] == APPLY:
            assert summed[descriptor, group] == set(range(strips[descriptor]))
    groups = {(i, group) for i, spec in enumerate(SPECS)
              for group in range(template(whole(spec), TRAITS).groups)}  # fmt: skip
    assert summed.keys() == groups
    assert applied.keys() == {(i, group) for i, group in groups if SPECS[i].shape[0]}
    assert all(applied[key] == summed[key] for key in applied)


def test_a_group_is_applied_soon_after_it_is_summed_and_backwards() -> None:
    spec = Spec(FLOAT16, (100_352, 256), 1)
    table = drawn(spec)
    strips = template(whole(spec), TRAITS).cut.strips
    first = table[table[:, GROUP] == 0]
    assert first[:, STRIP].tolist() == [*range(strips), *reversed(range(strips))]
    between = np.flatnonzero(table[:, GROUP] == 0)[strips] - strips
    assert 0 < between < strips  # others sum meanwhile, less than another group


def test_inference_takes_one_pass() -> None:
    table = drawn(Spec(FLOAT32, (1000, 64), 1, is_training=False))
    assert set(table[:, PHASE]) == {INFER}
    assert len(set(itertools.zip_longest(table[:, GROUP], table[:, STRIP]))) == len(table)


def test_a_resident_group_is_one_ticket() -> None:
    spec = Spec(FLOAT32, (49, 256), 1)
    made = template(whole(spec), TRAITS._replace(shared_nbytes=227 << 10))
    assert made.kernel.symbol == "first_float32_training_resident"
    assert made.tickets[:, GROUP].tolist() == list(range(made.groups))
    assert set(made.tickets[:, PHASE]) == {RESIDE}
    assert made.kept_nbytes == 2 * 49 * made.cut.group_channels * 4
