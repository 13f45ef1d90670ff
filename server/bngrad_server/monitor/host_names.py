"""The names of hosts by which the HTTP port may be asked.

A page of a stranger, in a browser that reaches the port, could else read it by DNS rebinding: the stranger's name leads
to the stranger's server first, and then to the address of this one. The request still names the stranger's host.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
_OF_NO_STRANGER = (".localhost", ".internal", ".svc", ".cluster.local")
"""What ends the names of this host, of private networks and of Kubernetes clusters. Such names cannot be registered."""


class HostNames:
    """Decides by the ``Host`` header; any thread may use it."""

    def __init__(self, names: Iterable[str]) -> None:
        """Allows these names, the machine's own, addresses, and all that no stranger can own."""
        own = socket.gethostname()
        self._names = {_normalised(name) for name in (*names, own, f"{own}.local")}
        # The look-up can take many seconds where the network's name server does not answer.
        threading.Thread(target=self._add_full_name, name="full-name", daemon=True).start()

    def allows(self, host: str) -> bool:
        """Tells whether to answer a request with this header."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = _normalised(found[1])
        last = name.rpartition(".")[2]
        # A name that ends in a number is an address for browsers; one without a dot is not of the internet.
        is_address = name.startswith("[") or last.isdecimal()
        return is_address or "." not in name or name.endswith(_OF_NO_STRANGER) or name in self._names

    def _add_full_name(self) -> None:
        self._names.add(_normalised(socket.getfqdn()))


def _normalised(name: str) -> str:
    return name.lower().removesuffix(".")
