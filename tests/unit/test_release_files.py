"""What a release consists of: versions, changelog, links, recipe, workflow, pages about messages, the systemd unit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from tests.deploy import sbom

from bngrad_cli import settings
from bngrad_wire import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = "".join(
    file.read_text()
    for folder in ("client", "wire", "kernels", "server", "cli")
    for file in (ROOT / folder).rglob("*.py")
)
RECIPE = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())


def build_hook() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("folder", "version", "included"),
    [
        ("build/compiled", "standard", {"build/compiled": "bngrad_kernels/compiled"}),
        ("build/compiled", "editable", {}),
        ("", "standard", {}),
    ],
)
def test_a_wheel_has_the_compiled_kernels_that_the_build_names(
    monkeypatch: pytest.MonkeyPatch, folder: str, version: str, included: dict[str, str]
) -> None:
    monkeypatch.setenv("BNGRAD_COMPILED_KERNELS", folder)
    data: dict[str, Any] = {"force_include": {}}
    build_hook().CustomBuildHook(str(ROOT), {}, None, None, "", "wheel").initialize(version, data)
    assert data["force_include"] == included


def test_the_changelog_has_the_version_with_a_date() -> None:
    versions = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == ("Unreleased", "")
    assert versions[1][0] == __version__
    assert all(date for _, date in versions[1:])


@pytest.mark.parametrize(
    ("file", "spelt"),
    [
        ("docker/Dockerfile", "ARG VERSION={}\n"),
        ("docker/Dockerfile.cuda", "ARG VERSION={}\n"),
        ("docker/kubernetes/cpu/kustomization.yaml", "newTag: {}\n"),
        ("docker/kubernetes/gpu/kustomization.yaml", "newTag: {}-cuda\n"),
    ],
)
def test_images_and_what_asks_for_them_have_the_version(file: str, spelt: str) -> None:
    assert spelt.format(__version__) in (ROOT / file).read_text()


def test_the_conda_recipe_has_the_version_and_the_dependencies() -> None:
    assert RECIPE["context"]["version"] == __version__
    client, server = (output["requirements"]["run"] for output in RECIPE["outputs"])
    extras = PROJECT["project"]["optional-dependencies"]

    def recipe_names(requirements: list[str]) -> dict[str, str]:
        pairs = (text.partition(" ")[::2] for text in requirements if not text.startswith(("python ", "$")))
        return {name.replace("_", "-"): version for name, version in pairs}

    def project_names(requirements: list[str]) -> dict[str, str]:
        wanted = [Requirement(text) for text in requirements if not text.startswith("bngrad")]
        return {each.name.replace("_", "-"): ",".join(sorted(map(str, each.specifier))[::-1]) for each in wanted}

    assert recipe_names(client) == project_names(PROJECT["project"]["dependencies"] + extras["cli"])
    toml = {"tomli": ">=2.0.1"}  # what pydantic-settings[toml] adds: a recipe cannot ask for extras
    assert recipe_names(server) == project_names(extras["server"]) | toml


def test_the_sbom_names_the_version_and_every_locked_dependency(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    sbom.main(file)
    written = json.loads(file.read_text())
    root = written["metadata"]["component"]
    assert (root["name"], root["version"]) == ("bngrad", __version__)
    locked = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements/server.txt").read_text(), re.MULTILINE)
    assert locked
    assert {(each["name"], each["version"]) for each in written["components"]} == set(locked)


def test_make_refuses_an_old_python_before_it_makes_an_environment(tmp_path: Path) -> None:
    python, environment = tmp_path / "python", tmp_path / "venv"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\n')  # fails but for --version
    python.chmod(0o755)
    command = ["make", "--directory", str(ROOT), "demo", f"PYTHON={python}", f"VENV={environment}"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 2
    assert f"bngrad needs Python 3.10 or newer; PYTHON={python} is Python 3.9.2\n" in made.stderr
    assert not environment.exists()


def test_the_readme_of_the_packages_has_no_relative_links() -> None:
    text = (ROOT / "README.md").read_text()
    relative = re.compile(r"\]\((?!\w+:|#)")
    assert relative.search(text)
    hook = build_hook()
    for home in ("", "https://example.org/bngrad"):
        assert not relative.search(hook.readme(text, home, "1.2.3"))
    linked = hook.readme("[a](docs/a.md#b), ![c](c.png), [d](https://d), [e](#e)", "https://x", "1.2.3")
    assert linked == "[a](https://x/blob/v1.2.3/docs/a.md#b), ![c](https://x/raw/v1.2.3/c.png), [d](https://d), [e](#e)"


def test_files_of_the_repositorys_host_are_valid() -> None:
    forms = [str(path) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    workflows = list(map(str, (ROOT / ".github/workflows").glob("*.yml")))
    config = [str(ROOT / ".github/ISSUE_TEMPLATE/config.yml")]
    for schema, files in (
        ("github-issue-forms", forms),
        ("github-workflows", workflows),
        ("github-issue-config", config),
    ):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
        checked = subprocess.run(command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


def test_actions_are_pinned_by_hash() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", path.read_text())
        assert used
        assert [each for each in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", each)] == []


@pytest.mark.parametrize(("page", "least"), [("docs/troubleshooting.md", 20), ("docs/first-gpu.md", 7)])
def test_messages_on_the_pages_about_trouble_are_real(page: str, least: int) -> None:
    rows = re.findall(r"^\| (`.+?) \| ", (ROOT / page).read_text(), flags=re.MULTILINE)
    quoted = [message.replace('"', "`") for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= least
    messages = [part for message in quoted for part in message.split("...")]
    spelt = re.sub(r'"\s*\n\s*f?"', "", SOURCES).replace("{', '.join(data_formats)}", "NHWC, NCHW")
    spelt = spelt.replace("{limit_s:g}", "60")
    from_python = ("CERTIFICATE_VERIFY_FAILED",)
    assert [message for message in messages if message not in spelt and message not in from_python] == []


def test_the_page_for_gpus_installs_all_that_its_tests_import() -> None:
    makefile, page = (ROOT / "Makefile").read_text(), (ROOT / "docs/first-gpu.md").read_text()
    (imported,) = re.findall(r"^gpu-test-server:.*?import (click, .*?);", makefile, flags=re.MULTILINE | re.DOTALL)
    (installed,) = re.findall(r"^\$ pip install ([a-z].*?) #", page, flags=re.MULTILINE)
    extras = PROJECT["project"]["optional-dependencies"]
    dependencies = [*PROJECT["project"]["dependencies"], *extras["cuda12"], *extras["server"], *extras["cli"]]
    named = {*installed.split(), *(Requirement(each).name for each in dependencies)} - {"torch"}
    files = [str(file) for name in named for file in importlib.metadata.files(name) or ()]
    modules = [name.strip("\\ \n\t").partition(".")[0] for name in imported.split(",")]
    assert "cupy" in modules
    assert [module for module in modules if not any(re.match(rf"{module}(/|\.py$)", file) for file in files)] == []


def test_the_systemd_units_settings_are_valid() -> None:
    effective, _ = settings.load(ROOT / "examples/systemd/bngrad.toml", {})
    assert effective.http == "127.0.0.1:9464"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    unit = tmp_path / "bngrad.service"
    text = (ROOT / "examples/systemd/bngrad.service").read_text()
    unit.write_text(text.replace("/opt/bngrad/bin/bngrad", sys.executable))  # which must exist
    verified = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = [analyze, "security", "--offline=true", "--no-pager", "--threshold=25", str(unit)]
    rated = subprocess.run(command, capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout
