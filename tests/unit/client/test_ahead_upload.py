"""The states of a tensor that is sent ahead, seen by the sender, by calls and by its owner."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tests.unit.client.calls import SECONDS, interrupt_at

from bngrad._ahead.tensor import AheadTensor, places_of
from bngrad._ahead.upload import Place, Upload
from bngrad._deadline import ENDLESS, Cancellation, Deadline
from bngrad.typing import Array

TENSOR = np.ones((2, 3), np.float32)


class FakeServer:
    def send_ahead(
        self, tensor: Array | None, forget: Sequence[bytes], deadline: Deadline, cancellation: Cancellation
    ) -> Place | None:
        raise NotImplementedError

    def copy_to_gpu(self, copy: Array, deadline: Deadline, cancellation: Cancellation) -> bytes:
        raise NotImplementedError


class NoWait(Cancellation):
    """That of a call that must not wait."""

    def attach(self, callback: object) -> None:
        pytest.fail("the call waits")


SERVER, OTHER = FakeServer(), FakeServer()
PLACE = Place(SERVER, b"ticket")


def upload() -> tuple[Upload, list[Place]]:
    forgotten: list[Place] = []
    return Upload(TENSOR, forgotten.append), forgotten


def found(upload: Upload, server: FakeServer = SERVER, deadline: Deadline = ENDLESS) -> Place | None:
    return upload.place(server, deadline, Cancellation())


def test_calls_find_it_once_it_was_sent_and_only_where_it_is() -> None:
    sent, forgotten = upload()
    assert sent.begin(SERVER) is TENSOR
    assert sent.begin(SERVER) is None
    sent.end(PLACE)
    assert (found(sent), found(sent, OTHER), forgotten) == (PLACE, None, [])


def test_a_call_that_comes_first_sends_it_itself() -> None:
    queued, _ = upload()
    assert found(queued) is None
    assert queued.begin(SERVER) is None


def test_a_call_waits_for_its_end() -> None:
    for place in (PLACE, None):
        sending, _ = upload()
        sending.begin(SERVER)
        threading.Timer(0.05, sending.end, (place,)).start()
        assert found(sending) is place
    sending, _ = upload()
    sending.begin(SERVER)
    assert found(sending, OTHER) is None
    assert found(sending, deadline=Deadline.after(1e-3)) is None


def test_a_cancelled_call_waits_no_longer() -> None:
    sending, _ = upload()
    sending.begin(SERVER)
    cancellation = Cancellation()
    threading.Timer(0.05, cancellation.cancel).start()
    assert sending.place(SERVER, ENDLESS, cancellation) is None


def test_closing_forgets_it_in_every_state() -> None:
    queued, forgotten = upload()
    queued.close()
    assert (queued.begin(SERVER), forgotten) == (None, [])
    assert queued.place(SERVER, ENDLESS, NoWait()) is None

    sending, forgotten = upload()
    sending.begin(SERVER)
    sending.close()
    assert forgotten == []
    sending.end(PLACE)
    assert (forgotten, found(sending)) == ([PLACE], None)

    sent, forgotten = upload()
    sent.begin(SERVER)
    sent.end(PLACE)
    sent.close()
    sent.close()
    assert (forgotten, found(sent)) == ([PLACE], None)


def test_a_call_sends_itself_a_tensor_whose_handle_another_thread_has_closed_meanwhile() -> None:
    sent, _ = upload()
    sent.begin(SERVER)
    sent.end(PLACE)
    handle = AheadTensor(object(), TENSOR, TENSOR, sent)

    def places() -> dict[str, tuple[Upload, Place]]:
        return places_of({"x": handle}, {"x": TENSOR}, SERVER, ENDLESS, Cancellation())

    assert places() == {"x": (sent, PLACE)}
    handle.close()
    assert not places()


def test_copies_in_shared_memory_are_no_servers_business() -> None:
    copied, forgotten = upload()
    copied.begin(SERVER)
    copied.end(place := Place(SERVER, copy=TENSOR))
    assert found(copied) is place
    copied.close()
    assert (forgotten, found(copied)) == ([], None)


def test_a_copy_of_a_gpu_is_found_and_forgotten_by_its_ticket() -> None:
    copied, forgotten = upload()
    copied.begin(SERVER)
    copied.end(Place(SERVER, copy=TENSOR))
    assert copied.copy is TENSOR
    copied.add_ticket(b"ticket")
    place = found(copied)
    assert place is not None
    assert (place.ticket, place.copy is TENSOR) == (b"ticket", True)
    copied.close()
    assert (forgotten, found(copied)) == ([PLACE], None)  # without the memory

    closed, forgotten = upload()
    closed.begin(SERVER)
    closed.end(Place(SERVER, copy=TENSOR))
    closed.close()
    assert closed.copy is None
    closed.add_ticket(b"ticket")
    assert (forgotten, found(closed)) == ([PLACE], None)


def test_the_garbage_collector_may_close_it_amid_any_call_of_its_thread() -> None:
    sent, forgotten = upload()
    sent.begin(SERVER)
    sent.end(PLACE)

    def collect() -> None:
        with sent._mutex:
            sent.close()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert forgotten == [PLACE]


@pytest.mark.parametrize("call", [found, lambda sent: sent.close()], ids=["place", "close"])
def test_an_interrupt_at_any_step_lets_the_sender_go_on(call: Callable[[Upload], object]) -> None:
    for step in itertools.count():
        sent, _ = upload()
        is_over = not interrupt_at(step, lambda: call(sent), ("bngrad.", "threading"))  # noqa: B023 - it is called here
        sender = threading.Thread(target=sent.begin, args=(SERVER,), daemon=True)
        sender.start()
        sender.join(SECONDS)
        assert not sender.is_alive()
        if is_over:
            break
    assert step > 2


def test_a_forked_child_may_forget_a_handle_whose_lock_a_thread_of_its_parent_held() -> None:
    """Such as that which sends tensors ahead."""
    program = """
        import os, signal, threading
        import numpy
        from bngrad._ahead.tensor import AheadTensor
        from bngrad._ahead.upload import Upload
        tensor, held, may_end = numpy.ones(4), threading.Event(), threading.Event()
        upload = Upload(tensor, print)
        handle = AheadTensor(None, tensor, tensor, upload)
        def hold():
            with upload._mutex:
                held.set()
                may_end.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            del handle
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        may_end.set()
        thread.join()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout == "0\n"
