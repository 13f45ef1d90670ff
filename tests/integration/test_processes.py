"""Clients in processes with peculiarities: forks, descriptors, pickles, threads that are no threads."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import bngrad
import bngrad.aio
from bngrad_cli.embedded import EmbeddedServer

_CALL = """
import os, resource, sys, numpy, bngrad
x, one = numpy.random.default_rng(0).normal(size=(4, 8, 8, 4)).astype(numpy.float32), numpy.ones(4, numpy.float32)

def call(client):
    return client.fused_batch_norm_grad_v2(x, x, one, one, one).x_backprop.tobytes()

target = sys.argv[1]
"""
_FORK = """
parent = bngrad.Client(target)
expected = call(parent)
for _ in range(80):
    if os.fork() == 0:
        os._exit(0 if call(bngrad.Client(target)) == expected else 3)
    assert os.wait()[1] == 0
"""
_WITHOUT_DESCRIPTORS = """
limit = max(map(int, os.listdir("/proc/self/fd")))
client = bngrad.Client(target, retries=False)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    call(client)
except bngrad.UnavailableError as error:
    assert str(error).isprintable(), repr(str(error))
    print(error)
"""
_GEVENT, _EVENTLET = "import gevent.monkey; gevent.monkey.patch_all()", "import eventlet; eventlet.monkey_patch()"
_PATCHED = """
for arguments in ({}, {"transport": "stream"}, {"transport": "unary", "fallback": "local"}):
    try:
        bngrad.Client(target, **arguments)
    except RuntimeError as error:
        print(error)
with bngrad.Client(target, transport="unary") as client:
    call(client)
"""


def run(code: str, target: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, target]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_client_that_a_fork_made_gets_its_first_answer(server: EmbeddedServer) -> None:
    """In some of a hundred forks, grpcio loses its first connection."""
    run(_CALL + _FORK, server.target)


def test_a_process_without_descriptors_is_told_so_in_a_line(server: EmbeddedServer) -> None:
    said = run(_CALL + _WITHOUT_DESCRIPTORS, server.target)
    assert said.count("\n") == 1
    assert "This process has no file descriptor left: see ulimit -n." in said


@pytest.mark.parametrize(("patch", "name"), [(_GEVENT, "gevent"), (_EVENTLET, "eventlet")], ids=["gevent", "eventlet"])
def test_where_threads_are_replaced_only_a_client_that_needs_none_is_made(
    server: EmbeddedServer, patch: str, name: str
) -> None:
    said = run(f"{patch}\n{_CALL}{_PATCHED}", server.target).splitlines()
    assert len(said) == 3
    assert all(line.startswith(f"{name} has replaced Python's threads, which a client needs") for line in said)


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize("client_class", [bngrad.Client, bngrad.aio.Client])
def test_a_client_is_not_pickled_and_the_error_says_what_to_do(client_class: type, use: object) -> None:
    client = client_class("local:")
    with pytest.raises(
        TypeError, match=r"Client\('local:'\) cannot be pickled or copied: make a client in each proces"
    ):
        use(client)  # type: ignore[operator]


def test_a_tensor_that_was_sent_ahead_is_not_pickled(server: EmbeddedServer) -> None:
    with (
        bngrad.Client(server.target) as client,
        client.send_ahead(np.ones(2**20, np.float32)) as ahead,
        pytest.raises(TypeError, match="sent ahead is of one client, and cannot be pickled"),
    ):
        pickle.dumps(ahead)
