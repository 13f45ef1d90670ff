"""Certificates for tests, from authorities made for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM files."""

    certificate: Path
    key: Path


class Authority:
    """An authority, and its certificate in a PEM file."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self._name = name
        self.path = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, *names: str, common_name: str | None = None, expired: bool = False) -> Pair:
        """Issues a certificate for host names or for a client."""
        yesterday = datetime.now(timezone.utc) - timedelta(days=1)
        issued = self._ca.issue_cert(*names, common_name=common_name, not_after=yesterday if expired else None)
        stem = f"{self._name}-{common_name or names[0]}{'-expired' if expired else ''}"
        pair = Pair(self._directory / f"{stem}.pem", self._directory / f"{stem}.key")
        pair.certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        pair.key.write_bytes(issued.private_key_pem.bytes())
        return pair
