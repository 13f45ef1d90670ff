from __future__ import annotations

import pytest

from bngrad_kernels.cuda.kernel_selection import Traits, choose_kernel, lookahead
from bngrad_kernels.cuda.plan import cut
from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec

GPUS = {  # multiprocessors, shared memory a block may have, second-level cache
    "V100": Traits(80, 96 << 10, 6 << 20),
    "A100": Traits(108, 163 << 10, 40 << 20),
    "H100": Traits(132, 227 << 10, 50 << 20),
    "H200": Traits(132, 227 << 10, 60 << 20),
    "B200": Traits(148, 227 << 10, 126 << 20),
}


def kinds(spec: Spec) -> list[str]:
    """The kind of kernel on each GPU."""
    planned = cut(spec)
    chosen = (choose_kernel(planned, spec.channels, traits, is_training=spec.is_training) for traits in GPUS.values())
    return [kind.value for kind in chosen]


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((32, 112, 112, 64), 3, "streamed"),
        ((2, 7, 7, 64), 3, "resident"),
        ((32, 256, 28, 28), 1, "streamed"),  # too large for two blocks a processor
        ((32, 1024, 14, 14), 1, "resident"),
        ((32, 1022, 14, 13), 1, "streamed"),  # vectors that cannot be loaded in one piece
        ((256, 2048, 7, 7), 1, "streamed"),
        ((0, 64, 7, 7), 1, "streamed"),
    ],
    ids=str,
)
def test_every_gpu_keeps_small_groups_resident_and_streams_the_others(
    shape: tuple[int, ...], axis: int, expected: str
) -> None:
    assert kinds(Spec(BFLOAT16, shape, axis)) == [expected] * len(GPUS)


def test_inference_takes_one_pass() -> None:
    for shape in [(256, 112, 112, 64), (1, 1, 1, 8)]:
        spec = Spec(FLOAT32, shape, 3, is_training=False)
        assert set(kinds(spec)) == {"one pass"}


@pytest.mark.parametrize("traits", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("group", [0, 1 << 10, 1 << 20, 20 << 20, 1 << 40])
def test_something_is_always_summed_ahead_and_never_more_than_the_cache_holds(group: int, traits: Traits) -> None:
    assert 0 < lookahead(group, traits.cache_nbytes) <= traits.cache_nbytes // 2
