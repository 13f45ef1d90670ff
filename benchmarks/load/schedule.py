"""When requests arrive, and what is made of the times that they took."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def arrivals(rate: float, seconds: float, rng: np.random.Generator) -> Floats:
    """Sorted seconds of a Poisson process: ``rate`` arrivals per second in the mean, each independent of all others.

    Given their number, which is a Poisson variable, the times of such a process are uniform and independent.
    """
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
