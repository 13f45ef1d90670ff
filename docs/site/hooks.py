"""What the site shows instead of links to the repository's files, which it does not have."""

from __future__ import annotations

import re
from typing import Any

_REPOSITORY_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Makes such a link the path of its file."""
    return _REPOSITORY_LINK.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
