"""What pyproject.toml cannot say of the packages: links to the repository, and the compiled kernels of a wheel."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def readme(text: str, home: str, version: str) -> str:
    """Returns the README as an index shows it: links to files lead to the repository, or are plain text without one."""

    def replace(link: re.Match[str]) -> str:
        image, label, path = link.groups()
        if not home:
            return "" if image else label
        return f"{image}[{label}]({home}/{'raw' if image else 'blob'}/v{version}/{path})"

    return _LINK.sub(replace, text)


class CustomMetadataHook(MetadataHookInterface):
    """Makes the links and the README of the metadata from ``home``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds ``readme`` and ``urls``."""
        home = self.config["home"].rstrip("/")
        source = (Path(self.root) / "wire/bngrad_wire/__init__.py").read_text()
        version = source.partition('__version__ = "')[2].partition('"')[0]
        text = readme((Path(self.root) / "README.md").read_text(), home, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {}
        if home:
            metadata["urls"] = {
                "Homepage": home,
                "Documentation": f"{home}/tree/v{version}/docs",
                "Changelog": f"{home}/blob/v{version}/CHANGELOG.md",
                "Issues": f"{home}/issues",
                "Security": f"{home}/security/policy",
            }


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled CPU kernels in the folder that ``BNGRAD_COMPILED_KERNELS`` names into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the folder."""
        folder = os.environ.get("BNGRAD_COMPILED_KERNELS")
        if folder and version != "editable":
            build_data["force_include"][folder] = "bngrad_kernels/compiled"
