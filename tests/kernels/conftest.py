from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.kernels import backends
from tests.kernels.cuda.devices import TEST_DEVICE

from bngrad_kernels.backend import Backend

with contextlib.suppress(ImportError):  # a machine with a GPU may have no Hypothesis
    from hypothesis import HealthCheck, settings

    # On a busy machine an example may be suspended for seconds; that is no failure.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="module")
def teams_for_all_but_tiny_tensors() -> Iterator[None]:
    """Has several threads compute tensors from 128 KiB on, rather than from 1 MiB, so that small shapes test them."""
    with pytest.MonkeyPatch.context() as patch:
        if TEST_DEVICE == "cpu":
            patch.setattr("bngrad_kernels.cpu.backend.ALONE_BELOW_NBYTES", 2**17)
        yield


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """One of the backends; tests name them by `tests.kernels.backends.on_backends`."""
    return backends.create(request.param)
