"""The types of settings: their checks, and how text is converted."""

from __future__ import annotations

import ipaddress
import math
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from bngrad_kernels import machine
from bngrad_kernels.backends import devices
from bngrad_wire.addresses import MAX_PORT, host_and_port, unix_path
from bngrad_wire.limits import LONGEST_S

NONE = "none"


class Metavar(str):
    """The placeholder of a setting's value in the help."""


class Computed(str):
    """The words for a default that depends on the machine."""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _in_units(units: dict[str, float], *, is_whole: bool = False) -> BeforeValidator:
    """Converts text such as "30 s" to a number, which is rounded down if it has to be whole.

    Text without a unit is left to the check for numbers.
    """

    def convert(value: Any) -> Any:
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]+)", value.strip()) if isinstance(value, str) else None
        if found is None and isinstance(value, str) and not _is_number(value):
            raise ValueError(f"it should be a number, perhaps with one of the units {', '.join(units)}")
        if found is None:
            return value
        number, unit = found[1], found[2].lower()
        factors = {name.lower(): factor for name, factor in units.items()}
        if unit not in factors:
            raise ValueError(f"it should be a number, perhaps with one of the units {', '.join(units)}")
        if is_whole:
            return math.floor(Fraction(number) * Fraction(factors[unit]))
        return float(number) * factors[unit]

    return BeforeValidator(convert)


def at_least(least: int, text: str, why: str, *, or_none: bool = False) -> AfterValidator:
    """Refuses smaller values; with ``or_none``, 0 is allowed and stands for none."""

    def check(value: float) -> float:
        if value < least and not (or_none and value == 0):
            raise ValueError(f"it should be {'0 for none, or ' if or_none else ''}at least {text}: {why}")
        return value

    return AfterValidator(check)


def _check_memory(value: int) -> int:
    if value > (most := machine.memory_bytes()):
        raise ValueError(f"it should be at most {most}, the memory that this process may use")
    return value


def _split(value: Any) -> Any:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        return value
    return tuple(part.strip() for each in listed for part in each.split(","))


def _address(value: str) -> str:
    if not (unix_path(value) or _is_host_and_port(value)):
        raise ValueError(f"it should be HOST:PORT or unix:PATH, with a port of at most {MAX_PORT}")
    return value


def _mode(value: str) -> str:
    if not re.fullmatch("0?[0-7]{3}", value):
        raise ValueError("it should be three octal digits for owner, group and others, such as 0600 or 0660")
    return value


def _is_host_and_port(value: str) -> bool:
    place = host_and_port(value)
    return place is not None and place[1] <= MAX_PORT


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _http_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if _is_ipv6(host):  # without brackets
        value = f"[{host}]:{port}"
    if not _is_host_and_port(value):
        raise ValueError(f"it should be HOST:PORT, with a port of at most {MAX_PORT}")
    return value


def _advertised(value: str) -> str:
    place = host_and_port(value)
    if value != NONE and (place is None or not 0 < place[1] <= MAX_PORT):
        raise ValueError(f"it should be HOST:PORT, with a port from 1 to {MAX_PORT}, or none")
    return value


def _host_names(value: str) -> str:
    if not re.fullmatch(r"[\w.-]+(,[\w.-]+)*", value):
        raise ValueError("it should be names of hosts without ports, with commas between them")
    return value


def _device(value: str) -> str:
    if value != "auto":
        try:
            devices(value)
        except ValueError as error:
            raise ValueError("it should be auto, or 'cpu' or 'cuda:N', each once, with commas between them") from error
    return value


_POWERS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
Seconds = Annotated[
    float, _in_units({"ms": 1e-3, "s": 1, "min": 60, "h": 3600}), Field(le=LONGEST_S), Metavar("SECONDS")
]
"""A duration; text may have a unit."""
Bytes = Annotated[int, _in_units({"B": 1, **_POWERS}, is_whole=True), Metavar("BYTES")]
"""A size of memory; text may have a unit."""
IN_MEMORY = AfterValidator(_check_memory)
"""Refuses sizes beyond the memory of this process."""
Device = Annotated[str, AfterValidator(_device), Metavar("DEVICE")]
Mode = Annotated[str, AfterValidator(_mode), Metavar("MODE")]
Address = Annotated[str, AfterValidator(_address)]
HttpAddress = Annotated[str, AfterValidator(_http_address)]
Advertised = Annotated[str, AfterValidator(_advertised)]
HostNames = Annotated[str, AfterValidator(_host_names)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split), Metavar("ADDRESS")]
"""Text may list several, separated by commas."""
