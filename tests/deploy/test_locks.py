"""The locks satisfy pyproject.toml, agree with each other, and name no package index."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LOCKS = ("server", "cuda12", "dev", "build")


def locked(lock: str) -> dict[str, set[str]]:
    """Returns the versions of each package, which may differ by Python version."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.M):
        versions.setdefault(canonicalize_name(name), set()).add(version)
    return versions


def required(extra: str) -> list[Requirement]:
    """Returns the direct requirements of an extra, and the extras it includes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(text) for text in project["optional-dependencies"][extra]]
    included = [each for one in requirements if one.name == "bngrad" for name in one.extras for each in required(name)]
    own = [one for one in requirements if one.name != "bngrad"]
    return [*(Requirement(text) for text in project["dependencies"]), *own, *included]


@pytest.mark.parametrize("extra", ["server", "cuda12", "dev"])
def test_every_requirement_is_locked(extra: str) -> None:
    versions = locked(extra)
    for requirement in required(extra):
        found = versions.get(canonicalize_name(requirement.name), set())
        assert found, f"{requirement.name} is not in requirements/{extra}.txt: make lock"
        for version in found:
            assert requirement.specifier.contains(version), f"{requirement}, but locked is {version}: make lock"


@pytest.mark.parametrize("lock", ["server", "cuda12"])
def test_images_have_the_tested_versions(lock: str) -> None:
    tested = locked("dev")
    for name, versions in locked(lock).items():
        assert versions <= tested[name], name


@pytest.mark.parametrize("lock", ["server", "cuda12", "build"])
def test_packages_of_images_are_locked_by_hash(lock: str) -> None:
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(re.findall(r"^\S+==", text, re.M))
    assert all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_package_index(lock: str) -> None:
    assert not re.search(r"https?:|file:|index-url|find-links", (ROOT / f"requirements/{lock}.txt").read_text())
