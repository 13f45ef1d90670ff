"""``bngrad token``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from bngrad_wire.tokens import new_token


@click.group()
def token() -> None:
    """Makes tokens, by which a server knows its clients."""


@token.command()
@click.argument("name")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Add the line to this file, which is made if there is none, and print the token alone.",
)
def new(name: str, token_file: Path | None) -> None:
    """Makes a token for NAME: prints it, and the line for the file that `bngrad serve --token-file` reads.

    The line has a hash of the token; nothing can tell the token again.
    """
    try:
        secret, line = new_token(name)
        if token_file is not None:
            _append(token_file, line)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from error
    except OSError as error:
        raise click.ClickException(f"cannot add a line to {token_file}: {error.strerror}") from error
    if token_file is not None:
        click.echo(secret)
    else:
        click.echo(f"token, for {name} alone: {secret}")
        click.echo(f"line, for --token-file:  {line}")


def _append(path: Path, line: str) -> None:
    """Adds a line, also to a file whose last one has no end."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+", encoding="utf-8") as file:
        text = file.read()
        file.write(f"{'' if text == '' or text.endswith(chr(10)) else chr(10)}{line}\n")
