"""The client's calls to a server on the same host, at a third of its cost: one thread, prepared messages.

It leaves out what the client does for its users: converting arrays, sharing between threads, falling back.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import grpc
import numpy as np
from benchmarks.load.answers import Status
from benchmarks.load.generator import Outcome, Plan, Row, Setup
from benchmarks.load.messages import Request

from bngrad._shared_memory.pool import Pool
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_wire import http2

_METHOD = "/bngrad.v1.BatchNormGradService/FusedBatchNormGradV2"
_QUIET_TIMEOUT_S = 120.0
_GRACE_S = 1.0
"""How long to wait after a call's timeout for the server's DEADLINE_EXCEEDED."""
_QUARANTINE_S = 2.0
"""How long memory is quarantined after a failed call, since a worker may still write to it."""
_CONNECTION_TIMEOUT_S = 0.1
"""A request is not sent if no connection becomes free for this long; there are as many as the server accepts."""
_LONGEST_SLEEP_S = 0.1
_STATUSES = {0: Status.OK, 4: Status.DEADLINE_EXCEEDED, 8: Status.RESOURCE_EXHAUSTED, 14: Status.UNAVAILABLE}


@contextlib.contextmanager
def connect(setup: Setup) -> Iterator[Loop]:
    """Connects, makes each kind of request once, and keeps the answers."""
    directory = _directory(setup.target)
    if not Path(directory, "calls").is_socket():
        raise FileNotFoundError(f"{setup.target} has no sockets on this host: take another --transport")
    pool = Pool(str(Path(directory, "regions")))
    with contextlib.closing(pool):
        requests = [Request(pool, item, seed) for seed, item in enumerate(setup.items)]
        loop = Loop(str(Path(directory, "calls")), requests, setup.callers)
        loop.learn()
        yield loop


def _directory(target: str) -> str:
    with grpc.insecure_channel(target) as channel:
        stub = pb_grpc.BatchNormGradServiceStub(channel)
        try:
            return stub.ServerInfo(pb.ServerInfoRequest(), timeout=_QUIET_TIMEOUT_S).endpoints.local_directory
        except grpc.RpcError as error:
            call = cast("grpc.Call", error)  # The declared base class lacks the details.
            raise ConnectionError(f"{target}: {call.details()}") from error


class Loop:
    """Connections, each with one call at a time, in one thread."""

    def __init__(self, path: str, requests: list[Request], callers: int) -> None:
        self._requests = requests
        self._poll = select.epoll()
        self._idle = [_Caller(path) for _ in range(callers)]
        self._running: dict[int, _Caller] = {}
        self._errors: deque[str] = deque(maxlen=5)
        self._rows: list[Row] = []

    def learn(self) -> None:
        """Makes each kind of request once, and keeps its answer as the expected one."""
        for number, request in enumerate(self._requests):
            plan = Plan(np.array([number]), None, 0, math.inf, 1, _QUIET_TIMEOUT_S)
            rows, errors = (outcome := self.run(plan)).rows, outcome.errors
            if rows[0][4] != Status.OK:
                raise ConnectionError(f"{request.item}: {Status(rows[0][4]).name} {' '.join(errors)}")
            request.learn()

    def run(self, plan: Plan) -> Outcome:
        cpu_start = time.process_time()
        self._errors.clear()
        self._rows = []
        idle, self._idle = self._idle[plan.callers :], self._idle[: plan.callers]
        try:
            self._carry_out(plan)
        finally:
            self._idle += idle
        return Outcome(self._rows, time.process_time() - cpu_start, list(self._errors))

    def _carry_out(self, plan: Plan) -> None:
        coming = deque(zip(plan.items.tolist(), [] if plan.due is None else plan.due.tolist(), strict=False))
        items = deque(plan.items.tolist() if plan.due is None else ())
        time.sleep(max(0, plan.start - time.monotonic()))
        looked_at = none_idle_at = 0.0
        while coming or items or self._running:
            now = time.monotonic()
            if now >= plan.until:
                items.clear()
            while items and self._idle:
                self._send(items.popleft(), now, plan.timeout, waited=False)
            while coming and coming[0][1] <= now:
                item, due = coming[0]
                waited = due <= none_idle_at
                if now >= due + min(plan.timeout, _CONNECTION_TIMEOUT_S):
                    self._rows.append((item, due, now, now, int(Status.NOT_SENT), waited))
                elif self._idle:
                    self._send(item, due, plan.timeout, waited=waited)
                    now = time.monotonic()
                else:
                    none_idle_at = now
                    break
                coming.popleft()
            next_due = coming[0][1] - now if coming and self._idle else _LONGEST_SLEEP_S
            # The longest wait of epoll is in whole milliseconds, that of select is exact.
            select.select([self._poll], [], [], min(max(0, next_due), _LONGEST_SLEEP_S))
            for fd, _ in self._poll.poll(0):
                self._receive(self._running[fd])
            if now > looked_at + _LONGEST_SLEEP_S:
                looked_at = now
                for caller in [caller for caller in self._running.values() if now > caller.give_up_at]:
                    self._end(caller, Status.DEADLINE_EXCEEDED, broken=True)

    def _send(self, item: int, due: float, timeout: float, *, waited: bool) -> None:
        caller = self._idle.pop()
        if not caller.is_connected:
            caller.connect()
        self._running[caller.fd] = caller
        self._poll.register(caller.fd, select.EPOLLIN)
        try:
            caller.send(item, self._requests[item], due, due + timeout, waited=waited)
        except ConnectionError as error:
            self._errors.append(f"sending: {error}")
            self._end(caller, Status.UNAVAILABLE, broken=True)

    def _receive(self, caller: _Caller) -> None:
        try:
            answer = caller.receive()
        except http2.RpcError as error:
            status = _STATUSES.get(error.code, Status.OTHER)
            if status in (Status.UNAVAILABLE, Status.OTHER):
                self._errors.append(str(error))
            self._end(caller, status)
        except ConnectionError as error:
            self._errors.append(f"receiving: {error}")
            self._end(caller, Status.UNAVAILABLE, broken=True)
        else:
            if answer is not None:
                self._end(caller, Status.OK, answer)

    def _end(self, caller: _Caller, status: Status, answer: bytes = b"", *, broken: bool = False) -> None:
        done = time.monotonic()
        self._poll.unregister(caller.fd)
        del self._running[caller.fd]
        if broken:
            caller.close()
        self._idle.append(caller)
        request = self._requests[caller.item]
        if status is Status.OK:
            status = Status.OK if request.is_right(caller.result, answer) else Status.WRONG
        # A refused request was never staged; for all others, a worker may still write the answer.
        if status in (Status.OK, Status.WRONG, Status.RESOURCE_EXHAUSTED):
            request.free.append(caller.result)
        else:
            request.resting.append((done + _QUARANTINE_S, caller.result))
        if status is Status.OK and done > caller.deadline:
            status = Status.DEADLINE_EXCEEDED  # An answer, but too late to be of use.
        self._rows.append((caller.item, caller.due, caller.sent, done, int(status), caller.waited))


class _Caller:
    """Connects for its first call: the server keeps few connections that have made none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.is_connected = False

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self._path)
        sock.settimeout(_GRACE_S)  # For sending; nothing is waited for.
        self._connection = http2.ClientConnection(sock, "localhost")
        self.fd = sock.fileno()
        self.is_connected = True

    def send(self, item: int, request: Request, due: float, deadline: float, *, waited: bool) -> None:
        self.item, self.due, self.deadline, self.waited = item, due, deadline, waited
        self.sent = now = time.monotonic()
        self.give_up_at = deadline + _GRACE_S
        self.result = request.output(now)
        self._call = self._connection.call(_METHOD, timeout_s=deadline - now)
        self._call.send_message(request.message, self.result.field, end=True)

    def receive(self) -> bytes | None:
        """Returns the answer if it is complete."""
        self._connection.handle_available_frames()
        if not self._call.ended:
            return None
        nbytes = self._call.receive_message()
        answer = b"" if nbytes is None else self._call.read(nbytes)
        while nbytes is not None:
            nbytes = self._call.receive_message()
        return answer

    def close(self) -> None:
        self.is_connected = False
        self._connection.close()
