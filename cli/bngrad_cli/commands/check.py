"""``bngrad check``: checks that a server works."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import click

from bngrad_cli.target import NotOfferedError, Target, TargetError, TokenError
from bngrad_cli.target_options import Seconds, with_target

_RETRY_DELAY_S = 0.25


Step = Callable[[Target], str]
"""Checks one thing, and says what it found; raises TargetError for a fault, NotOfferedError for nothing to check."""


@click.command()
@with_target(default_timeout_s=10)
@click.option("--quick", is_flag=True, help="Only ask for the server's health; cheap enough to run every few seconds.")
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(0),
    default=0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the server is healthy, for one that has just been started.",
)
@click.option(
    "--long",
    "is_long",
    is_flag=True,
    help="Also send larger requests, in training and in inference, alone and many at once; takes about half a minute.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only what is wrong.")
def check(target: Target, quick: bool, wait_s: float, is_long: bool, quiet: bool) -> None:
    """Checks that a server works.

    TARGET is HOST:PORT or unix:PATH, by default localhost:50051. The server must be healthy and have a ready device.
    Over every transport, small requests of every op, type and layout must have the right results, with the same bits.
    If anything is wrong, the exit code is 1, and the last line says what, and what to do.
    """
    if quick and is_long:
        raise click.UsageError("--quick and --long exclude each other")
    steps: dict[str, Step] = {"health": partial(health, wait_s=wait_s)}
    if not quick:
        from bngrad_cli import checks  # noqa: PLC0415 - --quick must start fast

        steps |= checks.steps(is_long=is_long)
    for name, step in steps.items():
        try:
            mark, said = click.style("✓", fg="green"), step(target)
        except NotOfferedError as reason:
            mark, said = "-", str(reason)
        except TargetError as error:
            click.echo(f"{click.style('✗', fg='red')} {name:<8} {error.message}", err=True)
            sys.exit(1)
        if not quiet:
            click.echo(f"{mark} {name:<8} {said}")


def health(target: Target, wait_s: float) -> str:
    """Waits until the server says that it takes requests; not for a token to become valid."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            target.check_serving()
        except TokenError:
            raise
        except TargetError:
            if time.monotonic() + _RETRY_DELAY_S > deadline:
                raise
            time.sleep(_RETRY_DELAY_S)
        else:
            return f"{target.address} is SERVING"
