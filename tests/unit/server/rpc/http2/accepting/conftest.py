"""A port with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.security.authority import HOSTS, Authority
from tests.unit.server.rpc.http2.service import Service

from bngrad_server.security.certificates import Certificates


@pytest.fixture
def tls_service(tmp_path: Path) -> Iterator[tuple[Service, Authority]]:
    """A port whose clients over TCP need certificates of an authority."""
    authority = Authority(tmp_path)
    own = authority.issue(*HOSTS)
    service = Service(tmp_path, certificates=Certificates(own.certificate, own.key, authority.path))
    yield service, authority
    service.close()
