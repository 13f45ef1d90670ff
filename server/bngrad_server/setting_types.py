"""What the values of settings may be, and how texts say them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from bngrad_kernels.backends import devices
from bngrad_server.runtime import cgroup

_MAX_PORT = 2**16 - 1
_LONGEST_S = 7 * 24 * 3600


class Metavar(str):
    """What stands for a setting's value in the help."""


class Computed(str):
    """What a default that depends on the machine is, in words."""


def _in_units(units: dict[str, float]) -> BeforeValidator:
    """Has texts such as "30 s" become numbers; what has no unit is left to the check for numbers."""

    def convert(value: Any) -> Any:
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]+)", value.strip()) if isinstance(value, str) else None
        if found is None:
            return value
        number, unit = found[1], found[2].lower()
        factors = {name.lower(): factor for name, factor in units.items()}
        if unit not in factors:
            raise ValueError(f"it should be a number, perhaps with one of the units {', '.join(units)}")
        return float(number) * factors[unit]

    return BeforeValidator(convert)


def at_least(least: int, text: str, why: str, *, or_none: bool = False) -> AfterValidator:
    """Refuses what is less, but for a 0 that stands for none."""

    def check(value: float) -> float:
        if value < least and not (or_none and value == 0):
            raise ValueError(f"it should be {'0 for none, or ' if or_none else ''}at least {text}: {why}")
        return value

    return AfterValidator(check)


def _check_memory(value: int) -> int:
    if value > (most := cgroup.memory_bytes()):
        raise ValueError(f"it should be at most {most}, the memory that this process may use")
    return value


def _split(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _address(value: str) -> str:
    is_right = value != "unix:" if value.startswith("unix:") else _is_host_and_port(value)
    if not is_right:
        raise ValueError("it should be HOST:PORT or unix:PATH")
    return value


def _is_host_and_port(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and "/" not in host and port.isascii() and port.isdigit() and int(port) <= _MAX_PORT


def _http_address(value: str) -> str:
    if value.startswith("unix:") or not _is_host_and_port(value):
        raise ValueError("it should be HOST:PORT")
    return value


def _device(value: str) -> str:
    if value != "auto":
        try:
            devices(value)
        except ValueError as error:
            raise ValueError(f"it should be auto, or 'cpu' or 'cuda:N' with commas between them: {error}") from error
    return value


_POWERS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
Seconds = Annotated[
    float, _in_units({"ms": 1e-3, "s": 1, "min": 60, "h": 3600}), Field(le=_LONGEST_S), Metavar("SECONDS")
]
"""A duration; texts may have a unit. Timers cannot do with any number."""
Bytes = Annotated[int, _in_units({"B": 1, **_POWERS}), Metavar("BYTES")]
"""A size of memory; texts may have a unit."""
IN_MEMORY = AfterValidator(_check_memory)
"""For sizes that would be too much for this machine."""
Device = Annotated[str, AfterValidator(_device), Metavar("DEVICE")]
Port = Annotated[int, Field(ge=0, le=_MAX_PORT), Metavar("PORT")]
Address = Annotated[str, AfterValidator(_address)]
HttpAddress = Annotated[str, AfterValidator(_http_address)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split), Metavar("ADDRESS")]
"""Texts may list several, with commas between them."""
