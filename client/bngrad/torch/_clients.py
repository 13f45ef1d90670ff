"""Names of clients: what the operators, which take tensors and plain values alone, know a client by."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from bngrad._client import Client, check_client
from bngrad._errors import BngradError

_numbers = itertools.count(1)
_names: weakref.WeakKeyDictionary[Client, str] = weakref.WeakKeyDictionary()
_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()


def find(name: str) -> Client:
    """Returns the client of a name.

    Raises:
        RuntimeError: No layer and no variable holds the client any longer.
    """
    client = _clients.get(name)
    if client is None:
        raise RuntimeError(f"{name} was deleted before the backward pass: keep it, or a layer that has it")
    return client


def is_cold(name: str) -> bool:
    """Whether the server of a client still compiles kernels of the first order, and computes in NumPy until then."""
    try:
        return any(kernel.endswith("-1") for kernel in find(name).server_info().compiling)
    except BngradError:
        return False


class ClientReference:
    """A layer's reference to its client: copies of the layer share the client, pickles leave it out.

    Attributes:
        client: The client; None for none.
        name: Its name in this process; empty for none.
    """

    def __init__(self, client: Client | None = None) -> None:
        self.client = client
        self.name = ""
        if client is not None:
            check_client(client)
            self.name = _names.setdefault(client, f"bngrad.Client {next(_numbers)}")
            _clients[self.name] = client

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientReference:
        return self

    def __reduce__(self) -> tuple[type[ClientReference], tuple[()]]:
        return ClientReference, ()
