"""Writes the tables of settings into docs/settings.md, from the model: ``make settings-page``."""

from __future__ import annotations

import re
from pathlib import Path

from bngrad_cli.settings import GROUPS, default_text, flag, metavar, variable
from bngrad_server.config import ServerConfig, setting_name

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"
_TABLES = re.compile(r"(<!-- tables: [^\n]*-->\n)(.*?)(<!-- end of tables -->\n)", re.DOTALL)
_FIELDS = {setting_name(name): field for name, field in ServerConfig.model_fields.items()}


def with_tables(page: str) -> str:
    """Returns the page with a table of the model's settings for each group."""
    tables = "".join(_section(title, names) for title, names in GROUPS.items())
    page, count = _TABLES.subn(lambda found: f"{found[1]}{tables}\n{found[3]}", page)
    assert count == 1, "the page has lost its tables"
    return page


def _section(title: str, names: tuple[str, ...]) -> str:
    rows = [f"\n## {title}\n", "| option, variable | value | default | what it is |", "|---|---|---|---|"]
    for name in names:
        field = _FIELDS[name]
        value = metavar(field).replace("|", "\\|")
        text = " ".join((field.description or "").split())
        rows.append(f"| `{flag(name)}` `{variable(name)}` | {value} | {default_text(field)} | {text} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
