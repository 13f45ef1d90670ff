"""``bngrad serve``: runs a server."""

from __future__ import annotations

import errno
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from bngrad_cli import settings
from bngrad_cli.main import is_scarcity

if TYPE_CHECKING:
    from bngrad_server.config import ServerConfig

logger = logging.getLogger(__name__)


@click.command(cls=settings.SettingsCommand)
@settings.settings_options
def serve(config: Path | None, **flags: Any) -> None:
    """Runs a server.

    SIGTERM, Ctrl-C or SIGHUP stops it after the requests in flight have ended; a second one stops it at once.

    Each setting comes from its flag, else from the environment, else from the file that --config names. Seconds may
    have the unit ms, s, min or h; bytes kB, MB, GB, TB, KiB, MiB, GiB or TiB.

    \b
    Examples:
      bngrad serve --listen unix:/tmp/bngrad.sock --http localhost:9464
      bngrad serve --listen 0.0.0.0:50051 --tls-certificate server.pem --tls-key server.key --token-file tokens
    """  # noqa: D301 - click wants the character \b
    effective, given = settings.load(config, flags)
    from bngrad_server.runtime.malloc import set_up_heap  # noqa: PLC0415

    set_up_heap()  # before NumPy and the log start threads
    from bngrad_server import server  # noqa: PLC0415 - help, completion and wrong settings do not need it
    from bngrad_server.errors import ListenError, SettingError, TracingError, WorkerStartError  # noqa: PLC0415
    from bngrad_server.telemetry import logs  # noqa: PLC0415

    logs.set_up(effective.log_format, effective.log_level)
    try:
        server.serve(effective)
    except SettingError as error:
        _fail(effective, settings.unusable(error, given))
    except (ListenError, TracingError, WorkerStartError) as error:
        _fail(effective, click.ClickException(str(error)))
    except (MemoryError, OSError, RuntimeError) as error:
        is_large = isinstance(error, OSError) and error.errno == errno.EFBIG  # the arena, for a file of this system
        if not (is_large or is_scarcity(error)):
            raise
        reason = f"the system does not give what a server needs, see ulimit -a: {str(error) or 'no memory'}"
        _fail(effective, click.ClickException(reason))


def _fail(config: ServerConfig, error: click.ClickException) -> NoReturn:
    """Ends the command, and says why in the format of the log."""
    if config.log_format == "json":
        logger.critical("%s", error.message)
        sys.exit(error.exit_code)
    raise error
