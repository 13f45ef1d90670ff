"""The certificate of the servers that speak TLS, in files that both ends know."""

from __future__ import annotations

from pathlib import Path

import trustme

_FOLDER = Path(__file__).parents[2] / "build" / "benchmark-tls"
CA = _FOLDER / "ca.pem"
CERTIFICATE = _FOLDER / "server.pem"
KEY = _FOLDER / "server.key"


def make() -> None:
    """Writes the files of a new authority."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(CA)
    server.cert_chain_pems[0].write_to_path(CERTIFICATE)
    server.private_key_pem.write_to_path(KEY)
