"""``bngrad check``: whether a server can be relied on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import click

from bngrad_cli.target import Target, TargetError, with_target

_LOOK_AGAIN_S = 0.25


class DoesNotApplyError(Exception):
    """What a step would look at is not there, and need not be; the message says why."""


Step = Callable[[Target], str]
"""Looks at one thing, and says what it saw; raises TargetError where that is not as it should be."""


@click.command()
@with_target(default_timeout_s=10)
@click.option("--quick", is_flag=True, help="Only ask for the server's health: cheap enough for every few seconds.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="How long the server may take to be healthy, for one that has just been started.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but what is wrong.")
def check(target: Target, quick: bool, wait_s: float, quiet: bool) -> None:
    """Checks that a server does what it should.

    TARGET is HOST:PORT or unix:PATH, localhost:50051 if it is left out. The server must be healthy and have a device
    that is ready. Over every way that tensors can go, small requests of every op, type and layout must come back right,
    and with the same bits. The exit code is 1 if anything is wrong; what, and what to do, is then said.
    """
    steps: dict[str, Step] = {"health": partial(health, wait_s=wait_s)}
    if not quick:
        from bngrad_cli import checks  # noqa: PLC0415 - a look at the health should cost little

        steps |= checks.steps()
    for name, step in steps.items():
        try:
            mark, said = click.style("✓", fg="green"), step(target)
        except DoesNotApplyError as reason:
            mark, said = "-", str(reason)
        except TargetError as error:
            click.echo(f"{click.style('✗', fg='red')} {name:<8} {error.message}", err=True)
            sys.exit(1)
        if not quiet:
            click.echo(f"{mark} {name:<8} {said}")


def health(target: Target, wait_s: float) -> str:
    """Whether the server says that it takes requests, at once or within a time."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            target.check_serving()
        except TargetError:
            if time.monotonic() + _LOOK_AGAIN_S > deadline:
                raise
            time.sleep(_LOOK_AGAIN_S)
        else:
            return f"{target.address} is SERVING"
