"""``bngrad completion``: the shell completes commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_CHANGES = [
    # In fish, click's script ends a description, or a path, at its first comma.
    ('string split "," $completion', 'string split --max 1 "," $completion'),
    # In zsh, compdef is known only after compinit, which a plain .zshrc does not call.
    ("    compdef ", "    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n    compdef "),
]


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
    source = shells(context.find_root().command, {}, "bngrad", "_BNGRAD_COMPLETE").source()
    for before, after in _CHANGES:
        source = source.replace(before, after)
    click.echo(source)
