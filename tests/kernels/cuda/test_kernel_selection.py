from __future__ import annotations

import pytest

from bngrad_kernels.cuda.kernel_selection import KernelKind, Traits, choose_kernel, is_read_from_cache, lookahead
from bngrad_kernels.cuda.plan import cut
from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec

GPUS = {  # multiprocessors, shared memory a block may have, second-level cache
    "V100": Traits(80, 96 << 10, 6 << 20),
    "A100": Traits(108, 163 << 10, 40 << 20),
    "H100": Traits(132, 227 << 10, 50 << 20),
    "H200": Traits(132, 227 << 10, 60 << 20),
    "B200": Traits(148, 227 << 10, 126 << 20),
}


def way(traits: Traits, spec: Spec) -> str:
    """The kernel and the second read of the table in kernel_selection.py, in short."""
    planned = cut(spec)
    kind = choose_kernel(planned, spec.channels, traits, is_training=spec.is_training)
    if kind is not KernelKind.STREAMED:
        return str(kind.value)
    group_nbytes = 2 * planned.rows * planned.inner * planned.group_channels * spec.dtype.itemsize
    return "cache" if is_read_from_cache(group_nbytes, traits.cache_nbytes) else "memory"


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((32, 112, 112, 64), 3, ["memory"] * 4 + ["cache"]),
        ((32, 56, 56, 256), 3, ["memory", "cache", "cache", "cache", "cache"]),
        ((32, 28, 28, 512), 3, ["memory", "cache", "cache", "cache", "cache"]),
        ((32, 14, 14, 1024), 3, ["cache"] * 5),
        ((256, 28, 28, 128), 3, ["memory", "memory", "memory", "cache", "cache"]),
        ((256, 56, 56, 256), 3, ["memory"] * 5),
        ((2, 7, 7, 64), 3, ["resident"] * 5),
        ((32, 64, 112, 112), 1, ["cache"] * 5),
        ((256, 64, 112, 112), 1, ["memory", "cache", "cache", "cache", "cache"]),
        ((32, 256, 28, 28), 1, ["cache"] * 5),  # too large for two blocks a processor
        ((32, 1024, 14, 14), 1, ["resident"] * 5),
        ((32, 1022, 14, 13), 1, ["cache"] * 5),  # vectors that cannot be loaded in one piece
        ((256, 2048, 7, 7), 1, ["cache"] * 5),
        ((0, 64, 7, 7), 1, ["cache"] * 5),
    ],
    ids=str,
)
def test_how_a_layer_is_computed_on_real_gpus(shape: tuple[int, ...], axis: int, expected: list[str]) -> None:
    assert [way(traits, Spec(BFLOAT16, shape, axis)) for traits in GPUS.values()] == expected


def test_inference_takes_one_pass() -> None:
    for shape in [(256, 112, 112, 64), (1, 1, 1, 8)]:
        spec = Spec(FLOAT32, shape, 3, is_training=False)
        assert {way(traits, spec) for traits in GPUS.values()} == {"one pass"}


@pytest.mark.parametrize("traits", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("group", [0, 1 << 10, 1 << 20, 20 << 20, 1 << 40])
def test_something_is_always_summed_ahead_and_never_more_than_the_cache_holds(group: int, traits: Traits) -> None:
    assert 0 < lookahead(group, traits.cache_nbytes) <= traits.cache_nbytes // 2
