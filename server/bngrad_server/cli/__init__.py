"""The command ``bngrad``. The command ``bngrad NAME`` is ``NAME`` in the module of this name."""

from __future__ import annotations

import importlib

import click

from bngrad_protos import __version__

_COMMANDS = ("serve", "config", "demo")


class _Commands(click.Group):
    """Imports a command when it is asked for: one that needs little starts soon."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"bngrad_server.cli.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="bngrad")
def main() -> None:
    """Gradients of fused batch normalisation as a gRPC service."""
