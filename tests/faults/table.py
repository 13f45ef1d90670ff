"""Every fault that a server with its clients must endure."""

from __future__ import annotations

from tests.faults import misbehaviour, processes, surroundings
from tests.faults.scene import Fault

_GONE = frozenset({"UnavailableError"})
_SHORT_OF_EVERYTHING = frozenset({"UnavailableError", "ResourceExhaustedError"})

FAULTS = [
    Fault(processes.kill_workers, kills_workers=True),
    Fault(processes.kill_all_workers, kills_workers=True),
    Fault(processes.freeze_a_worker, kills_workers=True, mixes=False),
    Fault(processes.freeze_a_worker_for_a_moment, mixes=False),
    Fault(processes.kill_clients),
    Fault(processes.storm_of_deadlines),
    Fault(misbehaviour.write_slowly),
    Fault(misbehaviour.read_slowly),
    Fault(misbehaviour.break_off),
    Fault(misbehaviour.come_in_crowds, mixes=False),
    Fault(misbehaviour.lie),
    Fault(surroundings.jump_in_time),
    Fault(surroundings.exhaust_descriptors, allowed=_SHORT_OF_EVERYTHING, mixes=False),
    Fault(processes.kill_the_front, allowed=_GONE, mixes=False),
    Fault(processes.stop_the_server, allowed=_GONE, mixes=False),
    Fault(processes.stop_the_server_at_once, allowed=_GONE, mixes=False),
]
FULL = Fault(surroundings.fill_shared_memory, mixes=False)
"""For a server that has /dev/shm for itself."""
