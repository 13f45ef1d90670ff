"""The public names, and the signatures of the clients' methods."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import bngrad

ADAPTERS = ("jax", "keras", "ray", "tensorflow", "torch")


def test_all_is_sorted_and_holds_every_public_name() -> None:
    others = ("annotations", *ADAPTERS)  # other tests may have imported an adapter
    public = [name for name in vars(bngrad) if not name.startswith("_") and name not in others]
    assert bngrad.__all__ == sorted([*public, "__version__"])


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    def methods(client: type) -> dict[str, inspect.Signature]:
        functions = inspect.getmembers(client, inspect.isfunction)
        return {name: inspect.signature(function) for name, function in functions if not name.startswith("_")}

    blocking, asynchronous = methods(bngrad.Client), methods(bngrad.aio.Client)
    assert blocking == asynchronous
    assert inspect.signature(bngrad.Client) == inspect.signature(bngrad.aio.Client)
    assert set(blocking) == {
        "batch_norm_training_backprop",
        "close",
        "empty",
        "fused_batch_norm_grad_grad",
        "fused_batch_norm_grad_v2",
        "fused_batch_norm_grad_v3",
        "send_ahead",
        "server_info",
    }


def test_arguments_that_the_ops_do_not_have_are_keyword_only() -> None:
    def named_only(function: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}

    of_calls = {"out": None, "priority": 0, "timeout": None}
    security = {"tls": False, "token": None, "insecure": False}
    of_clients = {"timeout": 60.0, "transport": "auto", "retries": True, "options": (), "fallback": None} | security
    assert named_only(bngrad.Client) == of_clients
    for name in ("fused_batch_norm_grad_v3", "fused_batch_norm_grad_v2", "fused_batch_norm_grad_grad"):
        assert named_only(getattr(bngrad.Client, name)) == {"reserve_space_2_kind": "variance"} | of_calls
    onednn = {"epsilon": inspect.Parameter.empty, "data_format": "NXC", "variance_kind": "variance"}
    assert named_only(bngrad.Client.batch_norm_training_backprop) == onednn | of_calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", ["V3", "V2"])
def test_arguments_and_results_are_those_of_tensorflows_op(version: str) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    theirs = inspect.signature(getattr(tensorflow.raw_ops, f"FusedBatchNormGrad{version}"))
    ours = inspect.signature(getattr(bngrad.Client, f"fused_batch_norm_grad_{version.lower()}"))

    def arguments(signature: inspect.Signature) -> list[tuple[str, object]]:
        of_ours_alone = ("self", "reserve_space_2_kind", "out", "priority", "timeout")
        names = [name for name in signature.parameters if name not in of_ours_alone]
        return [(name, signature.parameters[name].default) for name in names]

    assert arguments(ours) == arguments(theirs)
    results = getattr(bngrad, f"FusedBatchNormGrad{version}")._fields
    registry = importlib.import_module("tensorflow.python.framework.op_def_registry")
    assert list(results) == [output.name for output in registry.get(f"FusedBatchNormGrad{version}").output_arg]


def test_the_client_imports_neither_the_kernels_nor_their_libraries() -> None:
    heavy = ["bngrad_kernels", "bngrad_server", "numba", "cupy", *ADAPTERS, "flax", "click", "rich"]
    code = f"import sys, bngrad; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_another_system_is_refused_with_a_sentence() -> None:
    code = "import sys; sys.platform = 'darwin'; import bngrad"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: bngrad needs Linux, not darwin" in done.stderr
