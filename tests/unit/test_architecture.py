"""docs/architecture.md and CONTRIBUTING.md name only what exists, and the packages keep their shape."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("protos", "wire", "kernels", "client", "server", "cli")
PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/architecture.md")
MAX_MODULES = 12
REPOSITORY_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)}|tests|benchmarks|examples|docker|docs|requirements)/\S+")
MODULE = re.compile(r"(bngrad(?:_\w+)?(?:\.\w+)+)(?:\(\))?")


def module_name(path: Path) -> str:
    """The dotted name of a file below one of the folders."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in file.name]
MODULES = {module_name(file): file for file in FILES}
SOURCES = {name: file.read_text() for name, file in MODULES.items()}


def names_in(page: str) -> list[str]:
    """What a page puts between backticks, code blocks left out."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def imports_of(module: str) -> Iterator[str]:
    """The modules of ours that a module imports, anywhere in its source; not the package that it is in itself."""
    for node in ast.walk(ast.parse(SOURCES[module])):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else node.module for name in names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in found if name in MODULES and not f"{module}.".startswith(f"{name}."))


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_pages_exist(page: str) -> None:
    paths = [name for name in names_in(page) if REPOSITORY_PATH.fullmatch(name)]
    assert [path for path in paths if not list(ROOT.glob(path))] == []


def test_every_folder_of_tests_is_described() -> None:
    (row,) = re.findall(r"^\| `tests` \|.*", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    folders = {file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").glob("*/*.py")}
    assert [folder for folder in sorted(folders) if f"`{folder}`" not in row] == []


@pytest.mark.parametrize("page", PAGES)
def test_modules_in_pages_exist(page: str) -> None:
    """A name after a module's own must occur in that module's source."""
    missing = []
    for name in filter(None, map(MODULE.fullmatch, names_in(page))):
        module = attribute = name[1]
        while module and module not in MODULES:
            module, _, attribute = module.rpartition(".")
        if not module or (name[1] != module and not re.search(rf"\b{attribute}\b", SOURCES[module])):
            missing.append(name[0])
    assert missing == []


def test_table_of_threads_names_threads_that_exist() -> None:
    table = (ROOT / "docs/architecture.md").read_text().partition("## Threads")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `([\w-]+)", table, flags=re.MULTILINE)
    assert len(names) > 5
    source = "".join(SOURCES.values())
    assert [name for name in names if not re.search(rf"""["']{re.escape(name)}""", source)] == []


def test_every_thread_is_in_the_table() -> None:
    table = (ROOT / "docs/architecture.md").read_text().partition("## Threads")[2].partition("\n## ")[0]
    names = re.findall(r"""Thread\(.{0,160}?\bname=f?["']([\w-]+)""", "".join(SOURCES.values()), flags=re.DOTALL)
    assert [name for name in names if f"`{name}" not in table] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: set(imports_of(module)) for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_no_folder_holds_more_modules_than_one_sees_at_once() -> None:
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in FILES)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize(
    ("page", "lines"), [("README.md", 150), ("docs/architecture.md", 150), ("CONTRIBUTING.md", 120)]
)
def test_pages_to_be_read_first_are_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= lines
