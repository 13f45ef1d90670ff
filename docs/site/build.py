"""Builds the documentation as a site: gathers the pages in build/docs, then runs Zensical with the arguments.

python docs/site/build.py build --strict
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "docs"
OTHERS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "threat-model.md"}
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#]*)([^)]*)\)")


def gather() -> list[str]:
    """Copies every page to build/docs, with links that work there; returns the links to files that do not exist."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("site"))
    broken: list[str] = []
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(_with_links_of_the_site(page.read_text(), "docs", page.name, broken))
    for source, name in OTHERS.items():
        text = (ROOT / source).read_text()
        (PAGES / name).write_text(_with_links_of_the_site(text, "", source, broken))
    return broken


def _with_links_of_the_site(markdown: str, folder: str, page: str, broken: list[str]) -> str:
    """Points links at pages of the site; a link to any other file becomes the file's path."""

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in OTHERS or path.startswith("docs/"):
            return f"[{text}]({OTHERS.get(path) or path.removeprefix('docs/')}{anchor})"
        if not (ROOT / path).exists():
            broken.append(f"{page} links to {path}, which does not exist")
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)


if __name__ == "__main__":
    if broken_links := gather():
        sys.exit("\n".join(broken_links))
    sys.exit(subprocess.run([sys.executable, "-m", "zensical", *sys.argv[1:]], cwd=ROOT).returncode)  # noqa: PLW1510, S603
