"""The command ``bngrad``. The command ``bngrad NAME`` is ``NAME`` in the module of this name."""

from __future__ import annotations

import importlib
import os

import click
from click.shell_completion import CompletionItem

from bngrad_wire import __version__

_COMMANDS = {
    "serve": "Runs a server.",
    "config": "Prints the settings in effect, and where they come from.",
    "check": "Checks that a server does what it should.",
    "info": "Says what a server is: version, devices, limits, endpoints.",
    "bench": "Measures how fast a server answers.",
    "top": "Shows what a server does, in a terminal.",
    "demo": "Sends real gradients, checks the answers.",
    "token": "Makes tokens, by which a server knows its clients.",
    "completion": "Prints a script by which the shell completes bngrad's words.",
}


class _Commands(click.Group):
    """Imports a command when it is to run: one that needs little starts soon, and so do help and completion."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        # Read when grpcio is imported. It has lines of its own, not in the form of the log, for every stranger who
        # speaks TLS badly; and of what goes wrong with a call, the command says what there is to say.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        command: click.Command = getattr(importlib.import_module(f"bngrad_cli.commands.{cmd_name}"), cmd_name)
        return command

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
