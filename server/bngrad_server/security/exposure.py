"""Whether others than this host's users can reach a server, and what to say about it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

_FOR_ALL = "whoever reaches it may call: give it --token-file or --tls-client-ca"


def warnings(addresses: Sequence[str], *, has_tls: bool, knows_clients: bool) -> Iterator[str]:
    """What an operator should know about addresses that others can reach, a sentence for each.

    Args:
        addresses: Where the server listens, ``HOST:PORT`` or ``unix:PATH``.
        has_tls: Whether TCP connections are encrypted.
        knows_clients: Whether clients need tokens or certificates.
    """
    for address in addresses:
        if is_local(address):
            continue
        if not has_tls:
            who = "" if knows_clients else f", and {_FOR_ALL}"
            yield (
                f"{address} CAN BE REACHED FROM OTHER HOSTS WITHOUT TLS: tensors and tokens travel in the clear{who}. "
                "Give it --tls-certificate and --tls-key, or say --insecure if the network is protected otherwise."
            )
        elif not knows_clients:
            yield f"{address} can be reached from other hosts, and {_FOR_ALL}, or say --insecure."


def is_local(address: str) -> bool:
    """Whether an address is one of this host alone."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
