"""How loaded a server is, as it says in the trailers of its answers.

The format is ORCA's (Open Request Cost Aggregation, gRFC A51), which gRPC's ``weighted_round_robin`` and Envoy's
``client_side_weighted_round_robin`` read. The SDK reads the text, since grpcio hides the binary form from its callers.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

TEXT_HEADER = "endpoint-load-metrics"
BINARY_HEADER = "endpoint-load-metrics-bin"

_REQUESTS = b"requests"
_DOUBLE = struct.Struct("<d")
_RATE_TAG, _UTILIZATION_TAG, _NAMED_METRICS_TAG = b"\x31", b"\x49", b"\x42"
"""Of the fields ``rps_fractional``, ``application_utilization`` and ``named_metrics`` of ``OrcaLoadReport``."""
_KEY_TAG, _VALUE_TAG = b"\x0a", b"\x11"
_PREFIX = "TEXT "
_MAX_NCHARS = 512


class LoadReport(NamedTuple):
    """The load of a server.

    Attributes:
        rate: Requests that it computes per second.
        utilization: How busy its workers are; 1 is all of them, all the time.
        requests: How many requests are in the server, on average.
    """

    rate: float
    utilization: float
    requests: float

    @property
    def capacity(self) -> float | None:
        """The requests per second that it could compute; None if it has computed none, or if it is infinite."""
        capacity = self.rate / self.utilization if self.utilization > 0 else 0.0
        return capacity if 0 < capacity < math.inf else None

    def text(self) -> str:
        """Returns the value of the header in text."""
        rate, utilization, requests = (f"{value:.4g}" for value in self)
        return f"{_PREFIX}rps_fractional={rate},application_utilization={utilization},named_metrics.requests={requests}"

    def binary(self) -> bytes:
        """Returns the serialised ``xds.data.orca.v3.OrcaLoadReport``, the value of the binary header."""
        entry = _KEY_TAG + bytes([len(_REQUESTS)]) + _REQUESTS + _VALUE_TAG + _DOUBLE.pack(self.requests)
        fields = _RATE_TAG + _DOUBLE.pack(self.rate) + _UTILIZATION_TAG + _DOUBLE.pack(self.utilization)
        return fields + _NAMED_METRICS_TAG + bytes([len(entry)]) + entry


def parse(text: str) -> LoadReport | None:
    """Returns the report that a header in text carries; None if it is malformed or lacks a value that we use."""
    if not text.startswith(_PREFIX) or len(text) > _MAX_NCHARS:
        return None
    values = dict(pair.partition("=")[::2] for pair in text.removeprefix(_PREFIX).split(","))
    try:
        report = LoadReport(
            float(values["rps_fractional"]),
            float(values["application_utilization"]),
            float(values.get("named_metrics.requests", 0)),
        )
    except (KeyError, ValueError):
        return None
    return report if all(0 <= value < math.inf for value in report) else None
