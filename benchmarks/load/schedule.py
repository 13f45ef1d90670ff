"""When requests arrive, and what is made of the times that they took."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def arrivals(rate: float, seconds: float, rng: np.random.Generator) -> Floats:
    """The times of a Poisson process: ``rate`` arrivals per second in the mean, each independent of all others.

    Given their number, which is a Poisson variable, the times of such a process are uniform and independent.

    Args:
        rate: Per second.
        seconds: How long the process is watched.
        rng: The source of chance.

    Returns:
        Sorted seconds from the beginning.
    """
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
