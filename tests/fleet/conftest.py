"""A network of hosts, where this machine can have one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.namespaces import Network, run

_PROGRAMS = {"ip": "iproute2", "dnsmasq": "dnsmasq-base", "nft": "nftables"}
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


@pytest.fixture(scope="session")
def _sessions_share_fairly() -> Iterator[None]:
    """Keeps other sessions, such as other runs of these tests, from taking all processors for seconds.

    Linux 6.13 and later, without the revert of its commit 6d71a9c61604, does not charge a session for its time while
    the number of its running threads changes often, and then gives it all. It does so only if sessions are groups.
    """
    are_on = _AUTOGROUPS.exists() and _AUTOGROUPS.read_text().strip() == "1"
    if are_on and os.access(_AUTOGROUPS, os.W_OK):
        _AUTOGROUPS.write_text("0")
        yield
        _AUTOGROUPS.write_text("1")
    else:
        yield


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, _sessions_share_fairly: None) -> Iterator[Network]:
    """Hosts for a client and four servers, with a name server.

    Where there can be none, tests are skipped; with BNGRAD_REQUIRE_FLEET, they fail.
    """
    reason = _why_not()
    if reason and os.environ.get("BNGRAD_REQUIRE_FLEET"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with Network(tmp_path_factory.mktemp("dns"), "client", "first", "second", "third", "fourth") as made:
        yield made


def _why_not() -> str:
    """Returns why this machine cannot have network namespaces; empty if it can."""
    missing = [package for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        return f"hosts on one machine need programs that are missing; on Debian: apt-get install {' '.join(missing)}"
    namespace = f"bngrad{os.getpid()}-try"
    try:
        run("ip", "netns", "add", namespace)
    except OSError as error:
        return f"hosts on one machine need root and network namespaces: {error}"
    run("ip", "netns", "delete", namespace)
    return ""
