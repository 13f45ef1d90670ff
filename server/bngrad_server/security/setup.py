"""Security as the settings ask for it: certificates, the authenticator, and warnings about exposed addresses."""

from __future__ import annotations

import grp
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bngrad_server.config import ServerConfig
from bngrad_server.errors import SettingError
from bngrad_server.security.auth import Authenticator
from bngrad_server.security.certificates import Certificates
from bngrad_server.security.tokens import Tokens
from bngrad_wire.addresses import is_local

logger = logging.getLogger(__name__)

_ANYONE_MAY_CALL = "any client that reaches it may call: give it --token-file or --tls-client-ca"


def set_up(config: ServerConfig, on_refusal: Callable[[], object]) -> tuple[Certificates | None, Authenticator]:
    """Returns the server's certificates, None without TLS, and the authenticator of its calls.

    ``on_refusal`` is called when it refuses one.

    Raises:
        SettingError: A file cannot be read, or has the wrong content.
    """
    certificates = tokens = None
    if config.tls_certificate is not None and config.tls_key is not None:
        with _usable(
            tls_certificate=config.tls_certificate, tls_key=config.tls_key, tls_client_ca=config.tls_client_ca
        ):
            certificates = Certificates(config.tls_certificate, config.tls_key, config.tls_client_ca)
    if config.token_file is not None:
        with _usable(token_file=config.token_file):
            tokens = Tokens(config.token_file)
    authenticator = Authenticator(
        tokens,
        requires_certificate=config.tls_client_ca is not None,
        open_health=config.open_health,
        on_refusal=on_refusal,
    )
    if not config.insecure:
        knows_clients = authenticator.requires_token or authenticator.requires_certificate
        for warning in exposure_warnings(config.listen, has_tls=certificates is not None, knows_clients=knows_clients):
            logger.warning("%s", warning)
    return certificates, authenticator


def check_group(name: str | None) -> None:
    """Checks the setting ``shared_group``.

    Raises:
        SettingError: There is no such group, or the server's user is not in it.
    """
    if name is None:
        return
    try:
        number = grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise SettingError({"shared_group": name}, "it should be a group of this host") from error
    if os.geteuid() and number not in {os.getegid(), *os.getgroups()}:
        raise SettingError({"shared_group": name}, "the server's user should be in that group")


def check_files(config: ServerConfig) -> None:
    """Checks the files and the group that settings name, as a server that starts does.

    Raises:
        SettingError: One cannot be used.
    """
    check_group(config.shared_group)
    set_up(config, lambda: None)


@contextmanager
def _usable(**files: Path | None) -> Iterator[None]:
    """Turns errors of reading the files of settings into a SettingError of those settings that are the cause."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = expected = str(error)
        if isinstance(error, OSError):
            text, expected = str(error.filename), f"it should be a file that can be read: {error.strerror}"
        given = {name: path for name, path in files.items() if path is not None}
        named = {name: path for name, path in given.items() if f" {path} " in f" {text} "}
        raise SettingError(named or given, expected) from error


def exposure_warnings(addresses: Sequence[str], *, has_tls: bool, knows_clients: bool) -> Iterator[str]:
    """Warns of addresses that other hosts can reach, a sentence for each.

    Args:
        addresses: Where the server listens, ``HOST:PORT`` or ``unix:PATH``.
        has_tls: Whether TCP connections are encrypted.
        knows_clients: Whether clients need tokens or certificates.
    """
    for address in addresses:
        if is_local(address):
            continue
        if not has_tls:
            who = "" if knows_clients else f", and {_ANYONE_MAY_CALL}"
            yield (
                f"{address} CAN BE REACHED FROM OTHER HOSTS WITHOUT TLS: tensors and tokens travel unencrypted{who}. "
                "Give it --tls-certificate and --tls-key, or say --insecure if the network is protected otherwise."
            )
        elif not knows_clients:
            yield f"{address} can be reached from other hosts, and {_ANYONE_MAY_CALL}, or say --insecure."


def warn_of_http(address: str) -> None:
    """Warns of an address of HTTP that other hosts can reach."""
    if not is_local(address):
        logger.warning(
            "%s, the address of --http, can be reached from other hosts and has neither TLS nor tokens: any client "
            "that reaches it may read the metrics and the dashboard. Use 127.0.0.1, or say --insecure if the network "
            "is protected otherwise.",
            address,
        )
