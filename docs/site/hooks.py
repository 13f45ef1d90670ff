"""Adds the repository's own pages to the site, and replaces links to files that the site does not have."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[2]
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "threat-model.md"}
_LOG = logging.getLogger("mkdocs.hooks")  # whose warnings end a strict build
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#]*)([^)]*)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the README and its like as pages."""
    for source, page in _PAGES.items():
        files.append(File.generated(config, page, content=(_ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Points links at pages of the site; a link to any other file becomes the file's path."""
    folder = "" if page.file.src_uri in _PAGES.values() else "docs"

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in _PAGES or path.startswith("docs/"):
            return f"[{text}]({_PAGES.get(path) or path.removeprefix('docs/')}{anchor})"
        if not (_ROOT / path).exists():
            _LOG.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)
