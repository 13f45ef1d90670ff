"""``bngrad config``: prints the settings in effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bngrad_cli.settings import (
    Setting,
    SettingsCommand,
    as_text,
    default_text,
    load,
    metavar,
    settings_options,
    unusable,
)

if TYPE_CHECKING:
    from bngrad_server.config import ServerConfig


@click.command(cls=SettingsCommand)
@settings_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the value and the origin of each setting.")
@click.option("--toml", "as_toml", is_flag=True, help="Print a file for --config.")
def config(config: Path | None, as_json: bool, as_toml: bool, **flags: Any) -> None:
    """Prints the settings in effect, and where they come from.

    They are those of `bngrad serve` with the same options, environment and file, and are checked in the same way, with
    the files and the group that they name; addresses and devices are not tried.
    """
    if as_json and as_toml:
        raise click.UsageError("--json and --toml exclude each other")
    checked, effective = load(config, flags)
    if as_json:
        settings = {each.name: {"value": each.value, "origin": each.origin} for each in effective}
        print(json.dumps(settings, indent=2, default=str))
    elif as_toml:
        print("\n".join(map(_toml, effective)))
    else:
        _print_table(effective)
    _check_files(checked, effective)


def _check_files(checked: ServerConfig, effective: list[Setting]) -> None:
    from bngrad_server.errors import SettingError  # noqa: PLC0415 - they take longer to import than all else
    from bngrad_server.security.setup import check_files  # noqa: PLC0415

    try:
        check_files(checked)
    except SettingError as error:
        raise unusable(error, effective) from error


def _toml(setting: Setting) -> str:
    if setting.value is None:
        return f"# {setting.name} is not set"
    # Strings, numbers and lists are written in TOML as in JSON, but for its surrogate pairs.
    return f"{setting.name} = {json.dumps(setting.value, ensure_ascii=False, default=str)}  # {setting.origin}"


def _print_table(effective: list[Setting]) -> None:
    from rich.text import Text  # noqa: PLC0415 - JSON and TOML do not need it

    from bngrad_cli.terminal import plain_table, wide_console  # noqa: PLC0415

    table = plain_table("setting", "value", "unit", "origin")
    table.columns[0].no_wrap = True
    table.columns[1].overflow = "fold"  # rather than cut
    for each in effective:
        unit = metavar(each.field)
        value = default_text(each.field) if each.value is None else as_text(each.value)
        cells = each.name, value, unit.lower() if unit in {"SECONDS", "BYTES"} else "", each.origin
        # As text, since brackets, as of IPv6 addresses, would be markup.
        table.add_row(*map(Text, cells), style="bold" if each.origin != "default" else None)
    wide_console().print(table)
