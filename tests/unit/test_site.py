"""The documentation's site has every public name, and no link leads nowhere."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bngrad
import bngrad.typing

ROOT = Path(__file__).parents[2]
CLASSES = {
    f"bngrad.{name}": each for name, each in vars(bngrad).items() if name in bngrad.__all__ and type(each) is type
}
CLASSES["bngrad.aio.Client"] = bngrad.aio.Client

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference() -> str:
    """The page with the SDK reference, from a strict build of the site."""
    command = [sys.executable, "docs/site/build.py", "build", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return (ROOT / "build/site/sdk/index.html").read_text()


def test_every_public_name_has_an_entry(reference: str) -> None:
    entries = set(re.findall(r'\bid="(bngrad\.[\w.]+)"', reference))
    methods = {
        f"{name}.{method}"
        for name, each in CLASSES.items()
        if not issubclass(each, (tuple, Exception))
        for method, _ in inspect.getmembers(each, inspect.isfunction)
        if not method.startswith("_")
    }
    assert len(methods) >= 14
    types = {f"bngrad.typing.{name}" for name in bngrad.typing.__all__}
    assert CLASSES.keys() | methods | types <= entries


def test_signatures_show_values_rather_than_names_of_constants(reference: str) -> None:
    signature = reference.partition('id="bngrad.Client"')[2].partition("</pre>")[0]
    text = re.sub(r"<[^>]+>|\s", "", signature)
    assert "timeout:float=60.0" in text
    assert "DEFAULT" not in reference


@pytest.mark.parametrize("name", [name for name, each in CLASSES.items() if hasattr(each, "_fields")])
def test_every_field_of_a_result_is_described(reference: str, name: str) -> None:
    entry = reference.partition(f'id="{name}"')[2].partition('class="doc doc-object doc-class"')[0]
    fields: tuple[str, ...] = CLASSES[name]._fields  # type: ignore[attr-defined]
    assert [field for field in fields if f">{field}<" not in entry] == []
