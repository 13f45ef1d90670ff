"""Runs the batch-norm tests of PyTorch or TensorFlow themselves, with gradients of a client in place of their own.

    python -m tests.oracles.upstream torch CHECKOUT
    python -m tests.oracles.upstream tensorflow CHECKOUT

CHECKOUT is a checkout of the framework's sources of about the installed version. Further arguments go to pytest.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bngrad
from bngrad_cli.embedded import EmbeddedServer

_TESTS = {
    "torch": ("test/test_nn.py", "test/test_modules.py"),
    "tensorflow": ("tensorflow/python/ops/nn_fused_batchnorm_test.py",),
}
_CHOSEN = "(batchnorm or batch_norm) and not float64 and not sync"
"""float64 is refused with a sentence, and SyncBatchNorm is never ours."""
_METHODS = ("fused_batch_norm_grad_v2", "fused_batch_norm_grad_v3", "fused_batch_norm_grad_grad")


class CountedClient(bngrad.Client):
    """A client that counts its calls.

    Attributes:
        calls: How many ops were called.
    """

    calls = 0


def _counted(name: str) -> Callable[..., Any]:
    method = getattr(bngrad.Client, name)

    @functools.wraps(method)
    def call(self: CountedClient, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return method(self, *arguments, **named)

    return call


for _name in _METHODS:
    setattr(CountedClient, _name, _counted(_name))


def _into_torch(client: bngrad.Client) -> None:
    """Puts layers with a client in the place of PyTorch's."""
    import torch  # noqa: PLC0415 - only one of the frameworks may be installed
    from torch.testing._internal.common_modules import module_db  # noqa: PLC0415

    import bngrad.torch  # noqa: PLC0415

    for number in (1, 2, 3):
        name = f"BatchNorm{number}d"
        ours, stock = getattr(bngrad.torch, name), getattr(torch.nn, name)
        made = type(name, (ours,), {"__init__": functools.partialmethod(ours.__init__, client=client)})
        globals()[name] = made  # where pickle finds it
        setattr(torch.nn, name, made)
        for info in module_db:
            if info.module_cls is stock:
                info.module_cls = made


def _into_tensorflow(client: bngrad.Client) -> None:
    import bngrad.tensorflow  # noqa: PLC0415 - only one of the frameworks may be installed

    bngrad.tensorflow.install(client)


def main(framework: str, checkout: str, *options: str) -> int:
    """Runs the tests, and returns pytest's exit code."""
    with EmbeddedServer() as server, contextlib.closing(CountedClient(server.target)) as client:
        {"torch": _into_torch, "tensorflow": _into_tensorflow}[framework](client)
        files = [str(Path(checkout, file)) for file in _TESTS[framework]]
        chosen = ("-k", _CHOSEN) if framework == "torch" else ()
        code = pytest.main(["-c", "/dev/null", "-q", "-p", "no:cacheprovider", *chosen, *files, *options])
        print(f"the client was called {client.calls} times")
    return int(code)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in _TESTS:
        sys.exit(f"usage: python -m tests.oracles.upstream {'|'.join(_TESTS)} CHECKOUT [PYTEST_OPTION...]")
    sys.exit(main(*sys.argv[1:]))
