"""The thread that sends tensors ahead."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from tests.servers import wait_until
from tests.unit.client.calls import SECONDS, no_thread
from tests.unit.client.endpoints import Server

from bngrad import _validation
from bngrad._ahead.sender import AheadSender
from bngrad._ahead.upload import Place, Upload, _State
from bngrad._balancing.load_balancer import LoadBalancer
from bngrad._deadline import ENDLESS, Cancellation, Deadline
from bngrad._transports.selector import TransportSelector
from bngrad.typing import Array

TENSOR = np.ones((2, 3), np.float32)


class FakeServer(TransportSelector):
    """Takes tensors; their tickets are their numbers.

    Attributes:
        tensors: How many tensors came.
        forgotten: What each message had it forget, if anything.
        on_message: Called before a message is taken.
    """

    def __init__(self) -> None:
        self.tensors = 0
        self.forgotten: list[list[bytes]] = []
        self.on_message: Callable[[Cancellation], object] = lambda *_: None

    def send_ahead(
        self, tensor: Array | None, forget: Sequence[bytes], deadline: Deadline, cancellation: Cancellation
    ) -> Place | None:
        if tensor is not None:
            self.tensors += 1
        self.on_message(cancellation)
        if forget:
            self.forgotten.append(list(forget))
        return Place(self, b"%d" % self.tensors)

    def copy_to_gpu(self, copy: Array, deadline: Deadline, cancellation: Cancellation) -> bytes:
        return b""

    def close(self) -> None:
        pass


class Sender(AheadSender):
    """A sender to one server."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.load_balancer = LoadBalancer(lambda: ["localhost:1"], _validation.check_targets, lambda *_: self.server)
        super().__init__(self.load_balancer, SECONDS)

    def sent(self, count: int = 1) -> list[Upload]:
        """Sends tensors, and waits until they were."""
        uploads = [self.send(TENSOR) for _ in range(count)]
        wait_until(lambda: all(upload._place is not None for upload in uploads))
        return uploads

    def while_it_sends(self, act: Callable[[], None]) -> None:
        """Acts while it sends a tensor."""
        begun, may_end = threading.Event(), threading.Event()

        def hold(*_: object) -> None:
            begun.set()
            assert may_end.wait(SECONDS)

        self.server.on_message = hold
        self.send(TENSOR)
        assert begun.wait(SECONDS)
        self.server.on_message = lambda *_: None
        act()
        may_end.set()


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()
    made.load_balancer.close()


def test_a_tensor_goes_with_what_its_server_need_no_longer_keep(sender: Sender) -> None:
    """The server may be full."""
    (first,) = sender.sent()

    def act() -> None:
        first.close()
        sender.send(TENSOR)

    sender.while_it_sends(act)
    wait_until(lambda: sender.server.tensors == 3)
    (last,) = sender.sent()
    last.close()
    wait_until(lambda: len(sender.server.forgotten) == 2)
    assert sender.server.forgotten == [[b"1"], [b"4"]]  # each once


@pytest.mark.parametrize("is_with_tensor", [True, False])
def test_a_failure_ends_neither_the_thread_nor_what_the_server_must_still_be_told(
    sender: Sender, is_with_tensor: bool
) -> None:
    (first,) = sender.sent()
    failed = threading.Event()

    def fail(*_: object) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("for a test")

    def act() -> None:
        sender.server.on_message = fail
        first.close()
        if is_with_tensor:
            sender.send(TENSOR)

    sender.while_it_sends(act)
    assert failed.wait(SECONDS)
    if is_with_tensor:
        wait_until(lambda: sender.server.forgotten == [[b"1"]])
    (last,) = sender.sent()
    last.close()
    wait_until(lambda: sender.server.forgotten[-1:] == [[b"%d" % sender.server.tensors]])


def test_no_call_waits_for_a_tensor_whose_sending_has_failed(sender: Sender) -> None:
    def fail(*_: object) -> None:
        raise OSError("for a test")

    sender.server.on_message = fail
    upload = sender.send(TENSOR)
    wait_until(lambda: upload._state is _State.ENDED)
    assert upload.place(sender.server, ENDLESS, Cancellation()) is None


def test_a_server_is_told_of_many_tensors_at_once(sender: Sender) -> None:
    uploads = sender.sent(300)

    def act() -> None:
        for upload in uploads:
            upload.close()

    sender.while_it_sends(act)
    wait_until(lambda: len(sender.server.forgotten) == 2)
    assert [len(tickets) for tickets in sender.server.forgotten] == [256, 44]


def test_closing_ends_the_thread_and_what_it_sends(sender: Sender) -> None:
    def hold(cancellation: Cancellation) -> None:
        cancellation.sleep(10 * SECONDS)

    sender.server.on_message = hold
    upload = sender.send(TENSOR)
    wait_until(lambda: sender.server.tensors == 1)
    sender.close()
    sender._thread.join(SECONDS)
    assert not sender._thread.is_alive()
    assert upload.place(sender.server, ENDLESS, Cancellation()) is not None


def test_what_was_sent_is_kept_by_no_thread_and_counts_as_no_call(sender: Sender) -> None:
    kept = [weakref.ref(upload) for upload in sender.sent(2)]
    gc.collect()
    wait_until(lambda: [each() for each in kept] == [None, None])
    wait_until(lambda: sender.load_balancer._in_flight == 0)


def test_calls_send_their_tensors_while_the_system_has_no_thread_for_it(sender: Sender) -> None:
    with no_thread("bngrad-ahead"):
        upload = sender.send(TENSOR)
    assert upload.place(sender.server, ENDLESS, Cancellation()) is None
    sender.sent()
    assert sender.server.tensors == 1


def test_a_forked_child_that_forgets_the_client_ends_nothing_that_its_parent_sends(served: Server) -> None:
    program = """
        import gc, os, signal, sys
        import bngrad, numpy
        client = bngrad.Client(sys.argv[1], transport="stream")
        first = client.send_ahead(numpy.ones((1024, 1024), numpy.float32))
        sys.stdin.readline()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            del client, first
            gc.collect()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        second = client.send_ahead(numpy.ones((1024, 1024), numpy.float32))
        print(status, flush=True)
        sys.stdin.readline()
        client.close()
    """
    begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert may_end.wait(SECONDS)

    served.on_ahead = hold
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), served.target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert begun.wait(SECONDS)
            process.stdin.write("\n")
            assert process.stdout.readline() == "0\n"
            may_end.set()
            wait_until(lambda: len(served.ahead) == 2)
            process.stdin.write("\n")
            assert process.wait(SECONDS) == 0
        finally:
            may_end.set()
            process.kill()


def test_a_handler_of_a_signal_may_send_a_tensor_amid_the_start_of_the_thread(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = sender._thread.start

    def start_and_handle() -> None:
        monkeypatch.undo()
        sender.send(TENSOR)
        start()

    monkeypatch.setattr(sender._thread, "start", start_and_handle)
    sender.send(TENSOR)
    wait_until(lambda: sender.server.tensors == 2)
