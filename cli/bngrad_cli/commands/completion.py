"""``bngrad completion``: the shell completes commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Prints a completion script for the shell.

    \b
    bash: echo 'eval "$(bngrad completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(bngrad completion zsh)"' >> ~/.zshrc
    fish: bngrad completion fish > ~/.config/fish/completions/bngrad.fish
    """  # noqa: D301 - click does not rewrap what follows it
    shells = get_completion_class(shell)
    assert shells is not None
    click.echo(shells(context.find_root().command, {}, "bngrad", "_BNGRAD_COMPLETE").source())
