"""How a server's doors are guarded, as its settings say."""

from __future__ import annotations

import logging
from functools import partial

import grpc

from bngrad_server.config import ServerConfig
from bngrad_server.errors import ListenError
from bngrad_server.security import exposure
from bngrad_server.security.auth import Authenticator
from bngrad_server.security.certificates import CertificatePaths, Certificates
from bngrad_server.security.tokens import Tokens
from bngrad_server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


def set_up(config: ServerConfig, metrics: Metrics) -> tuple[Certificates | None, Authenticator]:
    """What is shown to clients, None for no TLS, and who says whom to answer.

    Raises:
        ListenError: A file cannot be read, or is of no use.
    """
    paths = None
    if config.tls_certificate is not None and config.tls_key is not None:
        paths = CertificatePaths(config.tls_certificate, config.tls_key, config.tls_client_ca)
    try:
        certificates = None if paths is None else Certificates(paths)
        tokens = None if config.token_file is None else Tokens(config.token_file)
    except OSError as error:
        names = ("tls_certificate", "tls_key", "tls_client_ca", "token_file")
        settings = [name for name in names if str(getattr(config, name)) == error.filename]
        raise ListenError(f"cannot read {error.filename}, {' and '.join(settings)}: {error.strerror}") from error
    except ValueError as error:
        raise ListenError(f"cannot listen as it should be: {error}") from error
    on_refusal = partial(metrics.refused_call, grpc.StatusCode.UNAUTHENTICATED.name)
    guard = Authenticator(tokens, requires_certificate=config.tls_client_ca is not None, on_refusal=on_refusal)
    if not config.insecure:
        knows_clients = guard.requires_token or guard.requires_certificate
        for warning in exposure.warnings(config.listen, has_tls=paths is not None, knows_clients=knows_clients):
            logger.warning("%s", warning)
    return certificates, guard
