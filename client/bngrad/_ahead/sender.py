"""Sends tensors ahead of the calls that need them, one after the other, in a thread."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

from bngrad._ahead.upload import Place, Server, Upload
from bngrad._balancing.load_balancer import LoadBalancer
from bngrad._deadline import Cancellation, Deadline, held_back
from bngrad.typing import Array

_FORGET_AFTER_S = 0.1
"""How long the server keeps what is needed no longer, so that it is told of many tensors at once."""
_MAX_FORGOTTEN = 256

_Queue: TypeAlias = "SimpleQueue[Upload | Place | None]"


class AheadSender:
    """The thread of one client that sends tensors ahead; it starts with the first one."""

    def __init__(self, load_balancer: LoadBalancer, timeout: float) -> None:
        """Starts nothing yet; ``timeout`` is how long a tensor may take, in seconds."""
        # The thread must not refer to self, and neither must uploads, or a client that is not closed would never end.
        self._queue: _Queue = SimpleQueue()
        self._running = Cancellation()
        arguments = self._queue, self._running, load_balancer, timeout
        # One object, which Python starts once, also after Ctrl-C has come amid that.
        self._thread = threading.Thread(target=_work, args=arguments, name="bngrad-ahead", daemon=True)
        self._mutex = threading.RLock()  # reentrant, since a handler of a signal may send a tensor amid the start
        self._end = weakref.finalize(self, _end, self._queue, self._running, os.getpid())
        self._end.atexit = False

    def send(self, tensor: Array) -> Upload:
        """Begins to send a tensor in C order, which must not change until it was used."""
        upload = Upload(tensor, self._queue.put)
        with self._mutex:
            if self._thread.ident is None:
                held_back(self._start)
        self._queue.put(upload)
        return upload

    def _start(self) -> None:
        with suppress(RuntimeError):  # the system has no more threads: calls send the tensor
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, and what it is sending."""
        self._end()


def _end(queue: _Queue, running: Cancellation, process: int) -> None:
    if process != os.getpid():  # a forked child has forgotten the client, whose connections its parent still uses
        return
    queue.put(None)
    running.cancel()


def _work(queue: _Queue, running: Cancellation, load_balancer: LoadBalancer, timeout: float) -> None:
    forgotten: dict[Server, list[bytes]] = {}  # tickets, of each server
    while True:
        try:
            item = queue.get(timeout=_FORGET_AFTER_S if forgotten else None)
        except Empty:
            _forget_all(forgotten, running, timeout)
            continue
        if item is None:
            return
        if isinstance(item, Upload):
            _send(item, forgotten, running, load_balancer, Deadline.after(timeout))
        else:
            forgotten.setdefault(item.server, []).append(item.ticket)
            if len(forgotten[item.server]) >= _MAX_FORGOTTEN:
                _forget_all(forgotten, running, timeout)
        del item  # frees the tensor before the next wait


def _send(
    upload: Upload,
    forgotten: dict[Server, list[bytes]],
    running: Cancellation,
    load_balancer: LoadBalancer,
    deadline: Deadline,
) -> None:
    """Sends a tensor; if that fails, the call that needs the tensor sends it, and raises an error if there is one."""
    with suppress(Exception):
        load_balancer.prepare(deadline, running, time.monotonic())
        use = load_balancer.acquire()
        if use is None:
            return
        try:
            server = use.server.selector
            tensor = upload.begin(server)
            if tensor is not None:
                place, tickets = None, forgotten.pop(server, [])
                try:
                    place = server.send_ahead(tensor, tickets, deadline, running)
                except Exception:
                    if tickets:  # the server may not know yet
                        forgotten[server] = tickets
                    raise
                finally:
                    upload.end(place)
                # Calls may use the copy meanwhile.
                if (copy := upload.copy) is not None and (ticket := server.copy_to_gpu(copy, deadline, running)):
                    upload.add_ticket(ticket)
        finally:
            load_balancer.release(use)


def _forget_all(forgotten: dict[Server, list[bytes]], running: Cancellation, timeout: float) -> None:
    for server, tickets in forgotten.items():
        with suppress(Exception):  # a server that has ended has forgotten them
            server.send_ahead(None, tickets, Deadline.after(timeout), running)
    forgotten.clear()
