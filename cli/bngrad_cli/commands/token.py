"""``bngrad token``: makes the tokens by which a server knows its clients."""

from __future__ import annotations

import os
from pathlib import Path

import click

from bngrad_wire.token_format import new_token


@click.group()
def token() -> None:
    """Makes the tokens by which a server knows its clients."""


@token.command()
@click.argument("name")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Append the line to this file, created if needed, and print only the token.",
)
def new(name: str, token_file: Path | None) -> None:
    """Makes a token for NAME, and prints it with its line for the file of `bngrad serve --token-file`.

    The line has only a hash of the token, so a lost token cannot be recovered.
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
    """Appends a line, also to a file whose last line has no newline."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+", encoding="utf-8") as file:
        text = file.read()
        file.write(f"{'' if text == '' or text.endswith(chr(10)) else chr(10)}{line}\n")
