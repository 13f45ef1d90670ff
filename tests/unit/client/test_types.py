"""What type checkers say of a program that calls the client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import grpc
import pytest

import bngrad
import bngrad.typing
from bngrad._errors import from_status

ROOT = Path(__file__).parents[3]
SOURCES = [str(ROOT / folder) for folder in ("client", "kernels", "wire", "protos")]

PROGRAM = """\
from __future__ import annotations

import asyncio
import pathlib

import ml_dtypes
import numpy as np
import torch

import bngrad
import bngrad.jax.nnx
import bngrad.keras
import bngrad.tensorflow
import bngrad.torch
import bngrad.typing


def backward(client: bngrad.Client, y_backprop: bngrad.typing.Tensor, x: bngrad.typing.Tensor) -> np.float32:
    scale, mean = np.ones(4, np.float32), client.empty(4)
    mean[:] = np.array([1, 2, 3, 4], np.float32)
    v3 = client.fused_batch_norm_grad_v3(y_backprop, x, scale, mean, [1.0, 2, 3, 4], None, data_format="NCHW")
    v2 = client.fused_batch_norm_grad_v2(y_backprop, x, (1, 1, 1, 1), mean, scale, reserve_space_2_kind="inverse_std")
    bfloat16 = client.empty((2, 3), dtype=ml_dtypes.bfloat16)
    client.batch_norm_training_backprop(bfloat16, bfloat16, mean, scale, epsilon=1e-3, out=bfloat16, timeout=5)
    client.batch_norm_training_backprop(x, y_backprop, mean, scale, epsilon=1, variance_kind="variance")
    return np.float32(v3.x_backprop.sum() + v2[0].sum())


class Named(bngrad.Client):
    name = "digits"


def name_of(target: str) -> str:
    with Named(target) as client, client.send_ahead(np.ones(3)) as x:
        return client.name + repr(x)


async def ask(target: str) -> tuple[str, ...]:
    try:
        async with bngrad.aio.Client(target, token=pathlib.Path("token"), tls=bngrad.Tls("ca.pem")) as client:
            return (await client.server_info()).ops
    except bngrad.InvalidArgumentError as error:
        return tuple(violation.field for violation in error.violations)


def convert(client: bngrad.Client) -> list[torch.nn.Parameter]:
    model = bngrad.torch.convert_batchnorm(torch.nn.Sequential(torch.nn.Linear(2, 4)), client, where="measured")
    model.append(bngrad.torch.BatchNorm1d(4, eps=1e-3, bias=True, client=client))
    bngrad.tensorflow.install(client, reserve_space_2_kind="variance")
    return list(bngrad.torch.revert_batchnorm(model).parameters())


def normalize(client: bngrad.Client, x: bngrad.typing.Array) -> None:
    y, _, _ = bngrad.jax.batch_norm(x, x[0], x[0], client=client, data_format="NDHWC")
    bngrad.jax.nnx.BatchNorm(4, client=client, axis=1)(y, use_running_average=True)
    bngrad.keras.BatchNormalization(axis=-1, client=client)
    bngrad.keras.convert(y, client)


with bngrad.Client(["a:1", "b:2"], timeout=30, transport="stream") as client:
    x = np.zeros((2, 3, 3, 4), np.float16)
    print(backward(client, x, x), asyncio.run(ask("a:1")))
"""

MISTAKES = {
    "a misspelt data format": ('data_format="NCHW"', 'data_format="NHCW"'),
    "an unknown kind": ('"inverse_std"', '"rsqrt"'),
    "a method that is not called": ("x, scale, mean, [", "x, scale, mean.mean, ["),
    "an unknown kind of variance": ('variance_kind="variance"', 'variance_kind="std"'),
    "a missing epsilon": ("epsilon=1e-3, ", ""),
    "a misspelt result": ("v3.x_backprop.sum", "v3.x_backdrop.sum"),
    "a file's name for a tensor": ("backward(client, x, x)", 'backward(client, "x.npy", x)'),
    "a data format of five dimensions for four": ("(1, 1, 1, 1), mean, scale", '[1], mean, scale, 1e-4, "NDHWC"'),
    "a result that was not awaited": ("(await client.server_info())", "client.server_info()"),
    "an unknown transport": ('"stream"', '"http"'),
    "a misspelt place": ('"measured"', '"measure"'),
    "a layer that is no client": ("bias=True, client=client", "bias=True, client=model"),
    "a kind of the other op": ('reserve_space_2_kind="variance"', 'reserve_space_2_kind="std"'),
    "a data format without channels": ('"NDHWC")\n    bngrad', '"NDHW")\n    bngrad'),
    "an address for a client": ("BatchNorm(4, client=client", 'BatchNorm(4, client="a:1"'),
    "a client that is missing": ("convert(y, client)", "convert(y)"),
    "a string for a timeout": ("timeout=30", 'timeout="30 s"'),
}


def by_mypy(path: Path) -> list[int]:
    """The lines of a program in which mypy --strict finds an error."""
    # The frameworks take half a minute to check, and find no mistake in this program.
    frameworks = ",".join(f"mypy-{name}.*" for name in ("flax", "jax", "keras", "tensorflow", "torch"))
    settings = f"[mypy]\nstrict = true\nmypy_path = {':'.join(SOURCES)}\n[{frameworks}]\nfollow_imports = skip\n"
    (path.parent / "mypy.ini").write_text(settings)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", path.name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
    assert done.stderr == ""
    return [int(line) for line in re.findall(rf"^{path.name}:(\d+): error:", done.stdout, flags=re.MULTILINE)]


def by_pyright(path: Path) -> list[int]:
    """The same for pyright's strict mode."""
    settings = {"typeCheckingMode": "strict", "extraPaths": SOURCES, "reportMissingTypeStubs": False}
    (path.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, path.name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    return [error["range"]["start"]["line"] + 1 for error in errors if error["severity"] == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_type_checkers_accept_a_program_and_find_each_mistake(
    check: typing.Callable[[Path], list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    assert check(path) == []

    text = PROGRAM
    for right, wrong in MISTAKES.values():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    planted = [
        number
        for number, (before, after) in enumerate(zip(PROGRAM.splitlines(), text.splitlines(), strict=True), 1)
        if before != after
    ]
    path.write_text(text)
    assert sorted(set(check(path))) == planted


def test_tracebacks_name_errors_as_users_import_them() -> None:
    errors = [each for each in vars(bngrad).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) > 5
    assert {error.__module__ for error in errors} == {"bngrad"}


def test_annotations_of_public_names_can_be_read() -> None:
    classes = [each for each in vars(bngrad).values() if isinstance(each, type)]
    for cls in [*classes, bngrad.aio.Client]:
        typing.get_type_hints(cls)
        for method in vars(cls).values():
            if callable(method) and getattr(method, "__module__", "").startswith("bngrad"):
                typing.get_type_hints(method)


def test_a_token_that_is_missing_or_not_accepted_is_answered_with_what_to_give() -> None:
    error = from_status(grpc.StatusCode.UNAUTHENTICATED, "a valid token is needed", b"", "host:1", 1.0)
    expected = "token= must be one that this server accepts: the token itself, or the pathlib.Path of its file"
    assert str(error) == f"host:1 answered UNAUTHENTICATED: a valid token is needed; {expected}"
