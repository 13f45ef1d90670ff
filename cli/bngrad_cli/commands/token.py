"""``bngrad token``: makes the tokens by which a server knows its clients."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import click

from bngrad_wire.token_format import new_token


@click.group()
def token() -> None:
    """Makes the tokens by which a server knows its clients."""


@token.command(short_help="Makes a token, and its line for the server's file.")
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
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from error
    try:
        if token_file is not None:
            _append(token_file, line)
    except OSError as error:
        reason = "it is a symbolic link; name its target" if error.errno == errno.ELOOP else error.strerror
        raise click.ClickException(f"cannot add a line to {token_file}: {reason}") from error
    if token_file is not None:
        click.echo(secret)
    else:
        click.echo(f"token, for {name} alone: {secret}")
        click.echo(f"line, for --token-file:  {line}")


def _append(path: Path, line: str) -> None:
    """Appends a line, also to a file whose last line has no newline.

    A file that another user has put there could give that user's tokens access, or lead elsewhere by a link.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        _check(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    with open(fd, "r+b", buffering=0) as file:
        try:
            text = file.read().decode()
        except UnicodeDecodeError as error:
            raise click.ClickException(f"cannot add a line to {path}: it is no file of tokens: {error}") from error
        added = f"{'' if text == '' or text.endswith(chr(10)) else chr(10)}{line}\n".encode()
        written = file.write(added)
        if written < len(added):  # the server would refuse a part of a line
            file.truncate(os.fstat(fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _check(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise click.ClickException(f"cannot add a line to {path}: it is no regular file")
    if mode & stat.S_IWOTH:
        found = f"{path} has mode {stat.S_IMODE(mode):04o}, so every user of this host may change it"
        raise click.ClickException(f"cannot add a line: {found}; it should have mode 0600: chmod 600 {path}")
