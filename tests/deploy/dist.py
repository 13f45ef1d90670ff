"""Installs a wheel in an empty environment, and calls a server from there: ``python -m tests.deploy.dist WHEEL``.

Then computes there without a server, by the kernels in the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from bngrad_cli.embedded import EmbeddedServer
from bngrad_wire import __version__

CALL = """
import sys, bngrad, numpy as np
x = np.random.default_rng(0).standard_normal((2, 4, 4, 8), np.float32)
stats = np.ones(8, np.float32)
with bngrad.Client(sys.argv[1]) as client:
    gradients = client.fused_batch_norm_grad_v3(x, x, stats, x.mean((0, 1, 2)), stats, None)
np.testing.assert_allclose(gradients.offset_backprop, x.sum((0, 1, 2)), rtol=1e-4, atol=1e-4)
print(bngrad.__version__, bngrad.__file__)
"""


def run(*command: object, folder: Path) -> str:
    """Runs a command far from the checkout, with an empty cache, and returns its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as name, EmbeddedServer(options=("--workers", "1")) as server:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        binaries = folder / "venv" / "bin"
        run(binaries / "pip", "install", "--quiet", wheel.resolve(), folder=folder)
        output = run(binaries / "python", "-W", "error", "-c", CALL, server.target, folder=folder)
        assert output.startswith(f"{__version__} {folder}"), output
        output = run(binaries / "bngrad", "info", "--timeout", "60", server.target, folder=folder)
        assert f"bngrad {__version__} on {server.target}: SERVING" in output, output
        run(binaries / "bngrad", "check", "--quick", server.target, folder=folder)
        run(binaries / "pip", "install", "--quiet", f"{wheel.resolve()}[local]", folder=folder)
        run(binaries / "python", "-W", "error", "-c", CALL, "local:", folder=folder)
        compiled = [file.name for file in (folder / "cache" / "bngrad").rglob("*.o")]
        assert not compiled, compiled
    print(f"{wheel.name}: the client alone called a server, and so did bngrad info and bngrad check --quick;")
    print("with Numba it computed by itself, and compiled nothing")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
