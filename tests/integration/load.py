"""Callers that do not stop while servers do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from tests.integration.problems import Inputs, assert_same_bits
from tests.servers import wait_until

import bngrad


class Load(AbstractContextManager["Load"]):
    """Threads that repeat the same requests and compare the bits of every answer."""

    def __init__(self, client: bngrad.Client, inputs: list[Inputs], callers: int = 8) -> None:
        self.answers = 0
        self.errors: list[Exception] = []
        self._client = client
        self._inputs = inputs
        self._expected = [client.fused_batch_norm_grad_v2(*each) for each in inputs]
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(callers)
        self._done = [self._threads.submit(self._send) for _ in range(callers)]

    def _send(self) -> None:
        while not self._stopping.is_set():
            for inputs, expected in zip(self._inputs, self._expected, strict=True):
                try:
                    assert_same_bits(self._client.fused_batch_norm_grad_v2(*inputs), expected)
                except Exception as error:
                    self.errors.append(error)
                    return
                self.answers += 1

    def wait(self, answers: int) -> None:
        """Waits until there are this many more answers."""
        goal = self.answers + answers
        wait_until(lambda: self.answers >= goal or bool(self.errors))
        assert not self.errors

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._threads.shutdown()
        assert not self.errors
