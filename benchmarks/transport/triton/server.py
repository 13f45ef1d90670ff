"""Starts Triton's server from NVIDIA's package nvidia-pytriton, as that package does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton
from benchmarks.ports import free_port
from benchmarks.transport.triton import MODEL, THREADS

from bngrad_server.runtime.processes import die_with_parent

_ROOT = Path(__file__).parents[3]
_ENVIRONMENT = _ROOT / "build" / "triton"
"""The server's own virtual environment, since its Python backend needs NumPy 1."""
_PYTHON = "{}.{}".format(*sys.version_info)
_PACKAGES = _ENVIRONMENT / "lib" / f"python{_PYTHON}" / "site-packages"
_STUB = "triton_python_backend_stub"
_START_TIMEOUT_S = 120.0


def start(address: str, threads: int, device: str) -> tuple[str, object]:
    """Serves on a free TCP port until this process ends.

    Raises:
        RuntimeError: The server ended, or was not ready in time.
    """
    assert (address, device) == ("127.0.0.1:0", "cpu"), (address, device)
    target = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        _command(target),
        env=_environment(threads),
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no other threads run yet.
        stdout=subprocess.DEVNULL,
    )
    _wait(process, target)
    return target, process


def _command(target: str) -> list[str]:
    tritonserver = _PACKAGES / "pytriton" / "tritonserver"
    backends = tritonserver / "backends"
    shutil.copy(tritonserver / "python_backend_stubs" / _PYTHON / _STUB, backends / "python" / _STUB)
    host, port = target.split(":")
    return [
        str(tritonserver / "bin" / "tritonserver"),
        f"--model-repository={Path(__file__).with_name('models')}",
        f"--backend-directory={backends}",
        f"--grpc-address={host}",
        f"--grpc-port={port}",
        "--backend-config=python,shm-default-byte-size=1073741824",
        "--allow-http=false",
        "--allow-metrics=false",
        "--log-info=false",
    ]


def _environment(threads: int) -> dict[str, str]:
    """Returns variables by which the server finds its libraries, and the model's process its Python and our code."""
    return {
        **os.environ,
        THREADS: str(threads),
        "LD_LIBRARY_PATH": str(_PACKAGES / "nvidia_pytriton.libs"),
        "PATH": f"{_ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
    }


def _wait(process: subprocess.Popen[Any], target: str) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    with triton.InferenceServerClient(target) as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                raise RuntimeError(f"tritonserver ended with {process.returncode}")
            try:
                if client.is_model_ready(MODEL):
                    return
            except triton.InferenceServerException:
                pass  # It does not listen yet.
            time.sleep(0.2)
    raise RuntimeError(f"tritonserver was not ready within {_START_TIMEOUT_S:.0f} s")
