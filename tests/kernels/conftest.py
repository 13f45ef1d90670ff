from __future__ import annotations

import contextlib

import pytest
from tests.kernels import backends

from bngrad_kernels.backend import Backend

with contextlib.suppress(ImportError):  # a machine with a GPU may have no Hypothesis
    from hypothesis import HealthCheck, settings

    # On a busy machine an example may be suspended for seconds; that is no failure.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """One of the backends; tests name them by `tests.kernels.backends.on_backends`."""
    return backends.create(request.param)
