"""``bngrad serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bngrad_cli import settings


@click.command()
@settings.settings_options
def serve(config: Path | None, **flags: Any) -> None:
    """Runs a server.

    SIGTERM or Ctrl-C stops it once the requests in flight have ended; a second one stops it at once.

    Settings come from flags, then from the environment, then from the file that --config names. Seconds may be written
    with ms, s, min or h, bytes with kB, MB, GB, KiB, MiB or GiB.
    """
    effective, _ = settings.load(config, flags)
    from bngrad_server import server  # noqa: PLC0415 - help, completion and refusals need none of it
    from bngrad_server.errors import ListenError, TracingError, WorkerStartError  # noqa: PLC0415
    from bngrad_server.telemetry import logs  # noqa: PLC0415

    logs.set_up(effective.log_format, effective.log_level)
    try:
        server.serve(effective)
    except (ListenError, TracingError, WorkerStartError) as error:
        raise click.ClickException(str(error)) from error
