"""What the site shows beside the pages' own text: the settings, and where files of the repository are."""

from __future__ import annotations

import re
from typing import Any

from bngrad_server.cli import settings
from bngrad_server.config import ServerConfig

_SETTINGS = "<!-- settings -->"
_REPOSITORY_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the settings; a link to a file of the repository, which the site does not have, becomes its path."""
    return _REPOSITORY_LINK.sub(_as_path, markdown.replace(_SETTINGS, _settings()))


def _as_path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


def _settings() -> str:
    rows = ["| flag, variable | default | what it does |", "|---|---|---|"]
    for name, field in ServerConfig.model_fields.items():
        alias = settings.setting_name(name)
        what = " ".join((field.description or "").split())
        names = f"`{settings.flag(alias)}`<br>`{settings.variable(alias)}`"
        rows.append(f"| {names} | {settings.default_text(field)} | {what} |")
    return "\n".join(rows)
