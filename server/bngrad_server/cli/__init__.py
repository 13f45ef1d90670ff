"""The command ``bngrad``."""

from __future__ import annotations

import click

from bngrad_protos import __version__
from bngrad_server.cli.demo import demo
from bngrad_server.cli.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="bngrad")
def main() -> None:
    """Gradients of fused batch normalisation as a gRPC service."""


main.add_command(demo)
main.add_command(serve)
