"""The group of commands: ``bngrad NAME`` is the function ``NAME`` of ``bngrad_cli.commands.NAME``."""

from __future__ import annotations

import errno
import importlib
import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from bngrad_wire import __version__

_COMMANDS = {
    "serve": "Runs a server.",
    "config": "Prints the settings in effect, and where they come from.",
    "check": "Checks that a server works.",
    "report": "Tests a GPU without a server, and writes a report.",
    "info": "Prints a server's version, devices, limits and endpoints.",
    "bench": "Measures how fast a server answers.",
    "advise": "Says where the gradients of a model's batch norms are fast.",
    "top": "Shows a server's activity in the terminal.",
    "warm": "Compiles the CPU kernels before a server needs them.",
    "demo": "Checks real gradients on a server of its own.",
    "token": "Makes the tokens by which a server knows its clients.",
    "completion": "Prints a completion script for the shell.",
}


_INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells: 128, and the number of SIGINT."""
_SCARCE = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_scarcity(error: Exception) -> bool:
    """Whether the system had no memory, file or thread left."""
    if "failed to map segment" in f"{error} {error.__context__}":  # a library cannot be loaded, such as llvmlite's
        return True
    if isinstance(error, OSError):
        return error.errno in _SCARCE
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


class _Commands(click.Group):
    """Imports a command only when it runs, so that small ones, help and completion start fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        # grpcio reads this at its import. Its own lines, such as one for each failed handshake, would mix with the
        # log of the server and with the errors of the other commands.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        command: click.Command = getattr(importlib.import_module(f"bngrad_cli.commands.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
        except (ImportError, MemoryError, OSError, RuntimeError) as error:
            if not is_scarcity(error):  # such as click's own
                raise
            reason = f"the system does not give what the command needs, see ulimit -a: {str(error) or 'no memory'}"
            raise click.ClickException(reason) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=_COMMANDS[name]) for name in _COMMANDS if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="bngrad")
def main() -> None:
    """Gradients of fused batch normalisation as a gRPC service."""
