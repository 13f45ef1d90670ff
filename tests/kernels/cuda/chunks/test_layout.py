from __future__ import annotations

import itertools
import threading
import tracemalloc

import numpy as np
import pytest
from tests.kernels.problems import spec_of

from bngrad_kernels.cuda.chunks.layout import ALIGNMENT, Footprint, Layout, LayoutCache, footprint, is_small
from bngrad_kernels.cuda.descriptors import DESCRIPTOR, POINTERS
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.spec import Spec

TRAITS = Traits(processors=132, shared_nbytes=227 << 10, cache_nbytes=50 << 20)
ADDRESS = 3 << 60


def footprint_of(spec: Spec, *, traits: Traits = TRAITS, has_scale: bool = True) -> Footprint:
    """The footprint of a whole problem of the first order."""
    vectors = ("scale", "reserve_space_1", "reserve_space_2") if has_scale else ("reserve_space_1", "reserve_space_2")
    inputs = [(name, spec.tensor_nbytes) for name in ("y_backprop", "x")]
    inputs += [(name, spec.stats_nbytes) for name in vectors]
    outputs = [(name, spec.stats_nbytes) for name in ("scale_backprop", "offset_backprop")]
    return footprint(spec, spec.channels, traits, tuple(inputs), (("x_backprop", spec.tensor_nbytes), *outputs))


SMALL, EMPTY, LARGE = (spec_of(1, shape) for shape in ((4, 8), (0, 4), (64, 32, 200)))


def test_equal_footprints_are_one_object_and_different_ones_are_not() -> None:
    assert footprint_of(SMALL) is footprint_of(spec_of(1, (4, 8)))
    others = [
        footprint_of(spec_of(1, (8, 4))),
        footprint_of(spec_of(1, (4, 8), epsilon=0.5)),
        footprint_of(SMALL, has_scale=False),
        footprint_of(SMALL, traits=TRAITS._replace(shared_nbytes=0)),
    ]
    assert len({footprint_of(SMALL), *others}) == 5
    assert len({each.number for each in (footprint_of(SMALL), *others)}) == 5


def test_arrays_are_aligned_and_do_not_overlap_and_large_ones_are_not_in_the_upload() -> None:
    footprints = [footprint_of(spec, has_scale=spec is not SMALL) for spec in (SMALL, LARGE, EMPTY, SMALL)]
    layout = Layout(footprints)
    large = [nbytes for each in footprints for _, nbytes in (*each.inputs, *each.outputs) if not is_small(nbytes)]
    starts = [place.start for place in layout.small_inputs]
    starts += [layout.downloaded + place.start for place in layout.small_outputs]
    assert all(start % ALIGNMENT == 0 for start in [*starts, *layout.large_inputs, *layout.large_outputs])
    ranges = [(place.start, place.stop) for place in layout.small_inputs]
    assert max(ranges)[1] <= layout.uploaded <= min(layout.large_inputs)
    ranges += [(layout.downloaded + place.start, layout.downloaded + place.stop) for place in layout.small_outputs]
    offsets = (*layout.large_inputs, *layout.large_outputs)
    ranges += [(offset, offset + nbytes) for offset, nbytes in zip(offsets, large, strict=True)]
    ranges = sorted(each for each in ranges if each[0] < each[1])
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] <= layout.nbytes


def test_descriptors_point_into_the_memory_at_its_address_and_absent_arrays_are_null() -> None:
    layout = Layout([footprint_of(SMALL, has_scale=False), footprint_of(LARGE)])
    upload = np.full(layout.uploaded, 0xFF, np.uint8)
    layout.write_tables(upload, ADDRESS)
    records = upload[layout.descriptors :][: 2 * DESCRIPTOR.itemsize].view(DESCRIPTOR)
    pointers = np.array([[int(record[name]) for name in POINTERS] for record in records], object)
    assert records["scale"].tolist()[0] == 0
    assert records["scale"].tolist()[1] == ADDRESS + layout.small_inputs[-3].start
    assert records["x"].tolist() == [ADDRESS + layout.small_inputs[1].start, ADDRESS + layout.large_inputs[1]]
    assert all(ADDRESS < each < ADDRESS + layout.nbytes for each in pointers[pointers != 0])
    assert not upload[: layout.descriptors].any()  # the counters


def test_a_layout_is_written_for_many_addresses_at_the_same_time() -> None:
    layout = Layout([footprint_of(SMALL)] * 50)

    def upload(address: int) -> bytes:
        written = np.zeros(layout.uploaded, np.uint8)
        layout.write_tables(written, address)
        return written.tobytes()

    addresses = [ALIGNMENT * number for number in range(1, 5)]
    expected = {address: upload(address) for address in addresses}
    wrong: list[int] = []

    def write(address: int) -> None:
        wrong.extend(address for _ in range(300) if upload(address) != expected[address])

    threads = [threading.Thread(target=write, args=(address,)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(set(expected.values())) == len(addresses)


def test_the_cache_makes_the_layout_of_the_same_pieces_once() -> None:
    cache = LayoutCache()
    small, empty = footprint_of(SMALL), footprint_of(EMPTY)
    first = cache.layout((small, empty))
    assert cache.layout((small, empty)) is first
    assert cache.layout((empty, small)) is not first
    assert cache.layout((small,)) is not first


def test_the_cache_forgets_what_was_not_used_for_the_longest_time() -> None:
    specs = [spec_of(1, (4, size)) for size in range(1, 17)]
    footprints = [footprint_of(spec) for spec in specs]
    cache = LayoutCache(most_nbytes=10 * max(Layout([each]).kept_nbytes for each in footprints))
    first, second = cache.layout((footprints[0],)), cache.layout((footprints[1],))
    for each in footprints[2:]:
        cache.layout((each,))
        assert cache.layout((footprints[0],)) is first
    assert cache.layout((footprints[1],)) is not second


def test_the_cache_keeps_no_layout_that_would_take_a_large_share_of_it() -> None:
    large = footprint_of(LARGE)
    nbytes = Layout([large]).kept_nbytes
    for most_nbytes, is_kept in ((8 * nbytes, True), (8 * nbytes - 8, False)):
        cache = LayoutCache(most_nbytes)
        assert (cache.layout((large,)) is cache.layout((large,))) is is_kept


@pytest.mark.parametrize("spec", [SMALL, LARGE, spec_of(1, (2, 5000, 600))], ids=lambda spec: str(spec.shape))
def test_the_cache_takes_no_more_memory_than_it_may(spec: Spec) -> None:
    one = footprint_of(spec)
    Layout([one])  # the templates have a cache of their own
    cache = LayoutCache(most_nbytes=4 << 20)
    tracemalloc.start()
    try:
        for count in range(1, 257):
            cache.layout((one,) * count)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 << 19 < taken < 4 << 20
