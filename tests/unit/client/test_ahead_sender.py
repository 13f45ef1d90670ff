"""The thread that sends tensors ahead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.servers import wait_until

from bngrad import _validation
from bngrad._ahead.sender import AheadSender
from bngrad._ahead.upload import Place
from bngrad._balancing.load_balancer import LoadBalancer
from bngrad._deadline import Cancellation, Deadline
from bngrad._transports.selector import TransportSelector
from bngrad.typing import Array

SECONDS = 30.0
TENSOR = np.ones((2, 3), np.float32)


class Unreliable(TransportSelector):
    """Takes the first tensor, fails at the second one, and keeps what it is told to forget."""

    def __init__(self) -> None:
        self.tensors = 0
        self.forgotten: list[bytes] = []

    def send_ahead(
        self, tensor: Array | None, forget: Sequence[bytes], deadline: Deadline, cancellation: Cancellation
    ) -> Place | None:
        if tensor is not None:
            self.tensors += 1
            if self.tensors == 2:
                raise OSError("for a test")
        self.forgotten += forget
        return Place(self, b"ticket")

    def copy_to_gpu(self, copy: Array, deadline: Deadline, cancellation: Cancellation) -> bytes:
        return b""

    def close(self) -> None:
        pass


def test_a_server_is_told_what_to_forget_also_after_a_tensor_failed_to_be_sent() -> None:
    server = Unreliable()
    load_balancer = LoadBalancer(["localhost:1"], _validation.check_targets, lambda *_: server)
    sender = AheadSender(load_balancer, SECONDS)
    first = sender.send(TENSOR)
    wait_until(lambda: server.tensors == 1)
    first.close()
    sender.send(TENSOR)
    wait_until(lambda: server.forgotten == [b"ticket"])
    assert server.tensors == 2
    sender.close()
    load_balancer.close()
