"""Security as the settings ask for it: certificates, the authenticator, and warnings about exposed addresses."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import grpc

from bngrad_server.config import ServerConfig
from bngrad_server.errors import ListenError
from bngrad_server.security.auth import Authenticator
from bngrad_server.security.certificates import Certificates
from bngrad_server.security.tokens import Tokens
from bngrad_server.telemetry.metrics import Metrics
from bngrad_wire.addresses import is_local

logger = logging.getLogger(__name__)

_ANYONE_MAY_CALL = "any client that reaches it may call: give it --token-file or --tls-client-ca"


def set_up(config: ServerConfig, metrics: Metrics) -> tuple[Certificates | None, Authenticator]:
    """Returns the server's certificates, None without TLS, and the authenticator of its calls.

    Raises:
        ListenError: A file cannot be read, or has the wrong content.
    """
    certificates = None
    try:
        if config.tls_certificate is not None and config.tls_key is not None:
            certificates = Certificates(config.tls_certificate, config.tls_key, config.tls_client_ca)
        tokens = None if config.token_file is None else Tokens(config.token_file)
    except OSError as error:
        names = ("tls_certificate", "tls_key", "tls_client_ca", "token_file")
        settings = [name for name in names if str(getattr(config, name)) == error.filename]
        raise ListenError(f"cannot read {error.filename}, {' and '.join(settings)}: {error.strerror}") from error
    except ValueError as error:
        raise ListenError(f"cannot set up TLS and tokens: {error}") from error
    on_refusal = partial(metrics.refused_call, grpc.StatusCode.UNAUTHENTICATED.name)
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
