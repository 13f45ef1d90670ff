"""Writes the SBOM of the server with its locked dependencies: ``python -m tests.deploy.sbom FILE``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bngrad_wire import __version__

ROOT = Path(__file__).parents[2]


def main(file: Path) -> None:
    # The generator reads no dynamic version.
    project, count = re.subn(
        r"^dynamic = .*$", f'version = "{__version__}"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
    )
    assert count == 1, "pyproject.toml has no dynamic version"
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as static:
        static.write(project)
        static.flush()
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--pyproject", static.name]
        locked = ROOT / "requirements/server.txt"
        subprocess.run([*command, "--output-reproducible", "--output-file", file, locked], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
