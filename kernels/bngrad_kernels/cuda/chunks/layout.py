"""Lays out the device memory of a chunk.

It is one block, which begins with everything that is uploaded in a single copy: counters, descriptors, work tiles and
the inputs of small pieces, which are first gathered on the host. The outputs of small pieces are adjacent too. A layout
follows from specs and numbers of channels, not from arrays, so batches that come again and again share one.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from bngrad_kernels.cuda.descriptors import DESCRIPTOR, POINTERS, KernelVariant, Template, schedule_tiles, template
from bngrad_kernels.cuda.kernel_selection import KernelKind, Traits
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import Spec

GATHER_BELOW_NBYTES = 256 << 10
"""Smaller arrays are gathered into one copy: a separate copy costs as much as copying that many bytes once more."""
ALIGNMENT = 256
"""Of every array and table in the device memory, in bytes."""
_COUNTER_NBYTES, _POINTER_NBYTES = 4, 8
_KEPT_NBYTES = 32 << 20
"""The layouts of thousands of small batches, or of hundreds of large ones."""
_OBJECTS_NBYTES = 2 << 10
"""More than Python's objects of a layout take, and than those for each of its pieces."""

Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""The sizes of arrays in bytes, by the names of their pointers in the descriptor."""
_Offsets: TypeAlias = dict[str, list[int]]
"""What the descriptors of all pieces point to, by the names of the pointers."""


def is_small(nbytes: int) -> bool:
    """Whether an array of this size is copied together with others."""
    return nbytes < GATHER_BELOW_NBYTES


@dataclass(frozen=True, eq=False, slots=True)
class Footprint:
    """Everything about a piece that a layout depends on. Equal ones are one object, so that comparing them is fast.

    Attributes:
        spec: The problem's spec.
        channels: How many channels the piece has.
        traits: The traits of the device.
        inputs: The sizes of the inputs.
        outputs: The sizes of the outputs.
        number: The order of footprints: that of their first use.
    """

    spec: Spec
    channels: int
    traits: Traits
    inputs: Sizes
    outputs: Sizes
    number: int


_numbers = itertools.count()


@functools.lru_cache(maxsize=1024)
def footprint(spec: Spec, channels: int, traits: Traits, inputs: Sizes, outputs: Sizes) -> Footprint:
    """The footprint with these attributes; cached."""
    return Footprint(spec, channels, traits, inputs, outputs, next(_numbers))


class Launch(NamedTuple):
    """A kernel launch. Offsets are in bytes from the start of the chunk's device memory.

    Attributes:
        kernel: The kernel to launch.
        work_tiles: The offset of its work tiles.
        tile_count: How many work tiles there are.
        tile_counter: The offset of the tile scheduler's counter.
        shared_nbytes: The dynamic shared memory of a block.
    """

    kernel: KernelVariant
    work_tiles: int
    tile_count: int
    tile_counter: int
    shared_nbytes: int


class Layout:
    """The device memory of a chunk; immutable. Offsets are in bytes from its start.

    Arrays are in the order of the pieces, and within a piece in that of its footprint.

    Attributes:
        descriptors: The offset of the descriptors.
        launches: The launches, in order.
        uploaded: How many bytes, from the start, are uploaded in a single copy.
        small_inputs: Where the small inputs are in the upload.
        large_inputs: The offsets of the large inputs.
        downloaded: The offset of what is downloaded in a single copy.
        downloaded_nbytes: Its size.
        small_outputs: Where the small outputs are in the download.
        large_outputs: The offsets of the large outputs.
        nbytes: The size of the device memory.
        kept_nbytes: The most memory of the host that the layout takes.
    """

    def __init__(self, footprints: Sequence[Footprint]) -> None:
        """Lays out pieces, at least one, for the same device."""
        templates = _in_few_launches(footprints)
        inputs, outputs = [each.inputs for each in footprints], [each.outputs for each in footprints]
        # What descriptors point to; 0 stands for null.
        offsets: _Offsets = collections.defaultdict(lambda: [0] * len(templates))
        self.nbytes = 0
        tables = self._place_tables(templates, offsets, footprints[0].traits.cache_nbytes)
        tables_end = self.nbytes
        self.small_inputs = self._place_small(inputs, offsets, start=0)
        self.uploaded = self.nbytes
        self.large_inputs = self._place_large(inputs, offsets)
        self.downloaded = self.nbytes
        self.small_outputs = self._place_small(outputs, offsets, start=self.downloaded)
        self.downloaded_nbytes = self.nbytes - self.downloaded
        self.large_outputs = self._place_large(outputs, offsets)
        for i, each in enumerate(templates):
            offsets["partials"][i] = self._take(each.partials_nbytes)
            offsets["coefficients"][i] = self._take(each.coefficients_nbytes)
        records = np.frombuffer(bytearray(b"".join(each.descriptor for each in templates)), DESCRIPTOR)
        for name, values in offsets.items():
            records[name] = values
        self._tables = np.zeros(tables_end, np.uint8)
        for at, table in [*tables, (self.descriptors, records)]:
            self._tables[at : at + table.nbytes] = table.reshape(-1).view(np.uint8)
        self._tables.flags.writeable = False
        self._pointer_shape = len(records), DESCRIPTOR.itemsize // _POINTER_NBYTES
        self._is_set = self._pointers(self._tables) != 0
        self.kept_nbytes = self._tables.nbytes + (1 + len(templates)) * _OBJECTS_NBYTES

    def write_tables(self, upload: Array, address: int) -> None:
        """Writes the upload, but for the inputs, for device memory that starts at ``address``."""
        upload[: len(self._tables)] = self._tables
        pointers = self._pointers(upload)
        np.add(pointers, address, out=pointers, where=self._is_set)

    def _pointers(self, upload: Array) -> Array:
        """The pointers of all descriptors."""
        rows, width = self._pointer_shape
        words = upload[self.descriptors :][: rows * width * _POINTER_NBYTES].view(np.uint64)
        return words.reshape(rows, width)[:, : len(POINTERS)]

    def _take(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return offset

    def _place_tables(
        self, templates: Sequence[Template], offsets: _Offsets, cache_nbytes: int
    ) -> list[tuple[int, Array]]:
        """Places counters, descriptors and work tiles; returns the latter, with their offsets."""
        kernels = list(dict.fromkeys(each.kernel for each in templates))
        groups = [each.groups for each in templates]
        # These come first, so that nothing a descriptor points to has offset 0, which stands for null.
        tile_counter = self._take(max(1, len(kernels)) * _COUNTER_NBYTES)
        for name, counts in (("arrived", [each.arrived_counters for each in templates]), ("ready", groups)):
            counters = self._take(sum(counts) * _COUNTER_NBYTES)
            before = itertools.accumulate(counts[:-1], initial=0)
            offsets[name] = [counters + _COUNTER_NBYTES * each for each in before]
        self.descriptors = self._take(len(templates) * DESCRIPTOR.itemsize)
        tables, launches = [], []
        for number, kernel in enumerate(kernels):
            indices = [i for i, each in enumerate(templates) if each.kernel == kernel]
            table = schedule_tiles([templates[i] for i in indices], indices, cache_nbytes)
            at = self._take(table.nbytes)
            tables.append((at, table))
            kept = max(templates[i].resident_nbytes for i in indices)
            launches.append(Launch(kernel, at, len(table), tile_counter + number * _COUNTER_NBYTES, kept))
        self.launches = tuple(launches)
        return tables

    def _place_small(self, arrays: Iterable[Sizes], offsets: _Offsets, start: int) -> tuple[slice, ...]:
        """Places small arrays next to each other; returns where they are, counted from ``start``."""
        places = []
        for i, own in enumerate(arrays):
            for name, nbytes in own:
                if is_small(nbytes):
                    offset = offsets[name][i] = self._take(nbytes)
                    places.append(slice(offset - start, offset - start + nbytes))
        return tuple(places)

    def _place_large(self, arrays: Iterable[Sizes], offsets: _Offsets) -> tuple[int, ...]:
        places = []
        for i, own in enumerate(arrays):
            for name, nbytes in own:
                if not is_small(nbytes):
                    offset = offsets[name][i] = self._take(nbytes)
                    places.append(offset)
        return tuple(places)


def _in_few_launches(footprints: Sequence[Footprint]) -> list[Template]:
    """Streams pieces that could be resident if others of their kind must be streamed: one launch is better than two."""
    templates = [template(each.spec, each.channels, each.traits) for each in footprints]
    kernels = {each.kernel for each in templates}
    return [
        template(own.spec, own.channels, own.traits._replace(shared_nbytes=0))
        if each.kernel.kind is KernelKind.RESIDENT and each.kernel._replace(kind=KernelKind.STREAMED) in kernels
        else each
        for own, each in zip(footprints, templates, strict=True)
    ]


class LayoutCache:
    """Keeps layouts, up to a number of bytes of the host's memory; forgets the least recently used. Thread-safe."""

    def __init__(self, most_nbytes: int = _KEPT_NBYTES) -> None:
        """Keeps nothing yet, and no layout that takes more than an eighth of ``most_nbytes``."""
        self._most_nbytes = most_nbytes
        self._mutex = threading.Lock()
        self._layouts: collections.OrderedDict[tuple[Footprint, ...], Layout] = collections.OrderedDict()
        self._nbytes = 0

    def layout(self, footprints: tuple[Footprint, ...]) -> Layout:
        """The layout of pieces, at least one, for the same device."""
        with self._mutex:
            known = self._layouts.get(footprints)
            if known is not None:
                self._layouts.move_to_end(footprints)
                return known
        made = Layout(footprints)  # without the mutex: another thread may make it, too
        if made.kept_nbytes <= self._most_nbytes // 8:
            with self._mutex:
                self._keep(footprints, made)
        return made

    def _keep(self, footprints: tuple[Footprint, ...], made: Layout) -> None:
        if footprints in self._layouts:
            return
        self._layouts[footprints] = made
        self._nbytes += made.kept_nbytes
        while self._nbytes > self._most_nbytes:
            _, forgotten = self._layouts.popitem(last=False)
            self._nbytes -= forgotten.kept_nbytes
