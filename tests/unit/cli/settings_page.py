"""Writes the table of settings into docs/settings.md, from the model: ``make settings-page``."""

from __future__ import annotations

import re
from pathlib import Path

from bngrad_cli.settings import default_text, flag, metavar, variable
from bngrad_server.config import ServerConfig, setting_name

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"
_TABLE = re.compile(r"(<!-- table: [^\n]*-->\n)(.*?)(<!-- end of table -->\n)", re.DOTALL)


def with_table(page: str) -> str:
    """Returns the page with the table of the model's settings."""
    rows = ["| option, variable | value | default | what it is |", "|---|---|---|---|"]
    for field_name, field in ServerConfig.model_fields.items():
        name = setting_name(field_name)
        names = f"`{flag(name)}` `{variable(name)}`"
        value = metavar(field).replace("|", "\\|")
        rows.append(f"| {names} | {value} | {default_text(field)} | {' '.join((field.description or '').split())} |")
    page, count = _TABLE.subn(lambda found: found[1] + "\n".join(rows) + "\n" + found[3], page)
    assert count == 1, "the page has lost its table"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
