"""The actor that owns a server on its node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from bngrad._client import Client
from bngrad._errors import BngradError, DeadlineExceededError, UnavailableError
from bngrad._results import ServerInfo
from bngrad.ray._process import ServerProcess
from bngrad_wire.addresses import format_host_port

_INFO_TIMEOUT_S = 1.0


class State(NamedTuple):
    """What a replica is doing.

    Attributes:
        target: Where its server listens; empty before it has been ready once.
        requests: How many requests are in the server; None if it does not answer.
        pid: The process id of its server.
        node_id: Ray's id of the node that it runs on.
    """

    target: str
    requests: int | None
    pid: int
    node_id: str


class Replica:
    """Owns a server on its node, and a client that asks it how much it has to do."""

    def __init__(self, options: Sequence[str], client_options: Mapping[str, Any]) -> None:
        """Starts the server on the address of this node without waiting for it."""
        host = format_host_port(ray.util.get_node_ip_address(), 0).rpartition(":")[0]
        self._process = ServerProcess(host, options)
        self._client = Client(lambda: [self._process.target], **client_options)

    def wait(self, timeout_s: float) -> None:
        """Waits until the server is ready, see `ServerProcess.wait`."""
        self._process.wait(timeout_s)

    def state(self) -> State:
        """Asks the server."""
        pid = self._process.pid  # of the server that answers, if one does
        info = self._info() if self._process.target else None
        node_id = ray.get_runtime_context().get_node_id()
        return State(self._process.target, info.requests + info.unread_connections if info else None, pid, node_id)

    def stop(self) -> None:
        """Has the server finish its requests, and waits until it has ended."""
        self._process.stop()
        self._client.close()

    def _info(self) -> ServerInfo | None:
        info = None
        try:
            info = self._client.server_info(timeout=_INFO_TIMEOUT_S)
        except (UnavailableError, DeadlineExceededError):
            self._process.heard(has_answered=False)
            return None
        except BngradError:  # such as for a missing token
            pass
        self._process.heard(has_answered=True)
        return info


def serve_options(resources: Mapping[str, float]) -> list[str]:
    """Returns the options of ``bngrad serve`` that follow from a replica's resources.

    Ray shows a process the GPUs that it has assigned, as the first ones; it does not bind it to CPUs.
    """
    gpus = math.ceil(resources.get("GPU", 0))
    if gpus:
        return ["--device", ",".join(f"cuda:{ordinal}" for ordinal in range(gpus))]
    return ["--device", "cpu", "--threads", str(max(math.floor(resources.get("CPU", 1)), 1))]


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of a Ray actor that needs these resources, named as in a placement group's bundle."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
    options.update({named[name]: amount for name, amount in resources.items() if name in named})
    options["resources"] = {name: amount for name, amount in resources.items() if name not in named}
    return options
