"""``bngrad report``: what to send when a GPU does not do what it should."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

import click

_PACKAGES = (
    "bngrad",
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
)
_SMI_FIELDS = "name,driver_version,vbios_version,pcie.link.gen.max,pcie.link.width.max,memory.total,memory.used"
_SMI_TIMEOUT_S = 60.0
_ROUNDS = 7
_SHAPES = {"a small problem": (32, 64, 49), "25 MB of float32": (32, 64, 3136)}


def _gpu(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"cuda:[0-9]+", value):
        raise click.BadParameter(f"it should name a GPU, such as cuda:0, not {value!r}")
    return value


@click.command()
@click.option(
    "--device",
    default="cuda:0",
    show_default=True,
    callback=_gpu,
    metavar="DEVICE",
    help="The GPU to test.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True),
    default="bngrad-report.json",
    show_default=True,
    metavar="FILE",
    help="Where to write the report; - for the standard output.",
)
@click.option("--long", "is_long", is_flag=True, help="Test with large problems too, which takes a minute.")
def report(device: str, output: str, is_long: bool) -> None:
    """Tests a GPU without a server, and writes a report.

    The report is a JSON file. It names the GPU, the driver and the versions of packages, the result of the self-test
    and some times. It holds no tensors of yours, no names of users or hosts, no paths and no settings. The exit code is
    1 if the GPU fails.
    """
    file = _opened(output)
    document: dict[str, Any] = {
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": _versions(),
        "nvidia_smi": _nvidia_smi(),
        "device": device,
    }
    try:
        document |= _tested(device, is_long)
    except Exception as error:
        document["failure"] = f"{type(error).__name__}: {error}"
    failure = document.get("failure")
    click.echo(f"{device}: {failure or document['self_test']}", err=True)
    is_written = _write(document, file)
    sys.stderr.flush()
    os._exit(1 if failure or not is_written else 0)  # a normal exit would call into a device that may hang


def _opened(name: str) -> TextIO:
    """Opens the file before the test, which may take a minute; a wrong command line has left it as it was."""
    try:
        return cast("TextIO", click.open_file(name, "w"))
    except OSError as error:
        raise click.BadParameter(f"{name}: {error.strerror}", param_hint="'--output'") from error


def _write(document: dict[str, Any], output: TextIO) -> bool:
    try:
        output.write(json.dumps(document, indent=2) + "\n")
        output.flush()
    except OSError as error:
        click.echo(f"Error: cannot write {output.name}: {error.strerror}", err=True)
        return False
    click.echo(f"written to {output.name}", err=True)
    return True


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _nvidia_smi() -> list[str]:
    """A line for each GPU, or why the program has none; empty without the program."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={_SMI_FIELDS}", "--format=csv"]
    try:
        done = subprocess.run(query, capture_output=True, check=False, timeout=_SMI_TIMEOUT_S)  # noqa: S603
    except subprocess.TimeoutExpired:  # as where the driver hangs
        return [f"no answer within {_SMI_TIMEOUT_S:g} s"]
    except OSError as error:
        return [f"it cannot be run: {error.strerror}"]
    return (done.stdout or done.stderr).decode(errors="replace").splitlines()


def _tested(device: str, is_long: bool) -> dict[str, Any]:
    from bngrad_kernels import backends  # noqa: PLC0415 - help must start fast
    from bngrad_kernels.cuda import self_test  # noqa: PLC0415
    from bngrad_kernels.spec import FLOAT32, Spec  # noqa: PLC0415

    began = time.perf_counter()
    backend = backends.create(device)
    backend.warm_up()
    found: dict[str, Any] = {"description": backend.description, "warm_up_s": time.perf_counter() - began}
    began = time.perf_counter()
    count = backend.self_test(is_long=is_long)
    taken_s = time.perf_counter() - began
    found["self_test"] = f"{backend.description} passed its self-test: {count} problems in {taken_s:.2f} s"
    found["milliseconds"] = {}
    for name, shape in _SHAPES.items():
        problem = self_test.random_problem(Spec(FLOAT32, shape, 1))
        found["milliseconds"][name] = _median_ms(lambda problem=problem: backend.run([problem]))  # type: ignore[misc]
    return found


def _median_ms(run: Callable[[], None]) -> float:
    """The median of some rounds, the first of which does not count."""
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return round(sorted(times[1:])[_ROUNDS // 2], 3)
