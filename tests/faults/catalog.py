"""Every fault that a server must survive."""

from __future__ import annotations

from tests.faults import client_faults, machine_faults, process_faults
from tests.faults.attack_faults import ATTACKED
from tests.faults.harness import Fault

_GONE = frozenset({"UnavailableError"})
_SHORT_OF_EVERYTHING = frozenset({"UnavailableError", "ResourceExhaustedError"})

FAULTS = [
    Fault(process_faults.kill_workers, kills_workers=True),
    Fault(process_faults.kill_all_workers, kills_workers=True),
    Fault(process_faults.freeze_a_worker, kills_workers=True, mixes=False),
    Fault(process_faults.freeze_a_worker_briefly, mixes=False),
    Fault(process_faults.kill_clients),
    Fault(process_faults.storm_of_deadlines),
    Fault(client_faults.write_slowly),
    Fault(client_faults.read_slowly),
    Fault(client_faults.disconnect),
    Fault(client_faults.open_many_connections, mixes=False),
    Fault(client_faults.send_malformed_requests),
    Fault(machine_faults.set_the_clock),
    Fault(machine_faults.exhaust_descriptors, allowed=_SHORT_OF_EVERYTHING, mixes=False),
    Fault(process_faults.kill_the_front_process, allowed=_GONE, mixes=False),
    Fault(process_faults.stop_the_server, allowed=_GONE, mixes=False),
    Fault(process_faults.stop_the_server_at_once, allowed=_GONE, mixes=False),
]
CONFINED = "confined"
"""The name of the server that has /dev/shm for itself."""
FULL = Fault(machine_faults.fill_shared_memory, mixes=False, server=CONFINED)
BESIDE_ATTACKS = [
    Fault(process_faults.kill_workers, kills_workers=True, server=ATTACKED),
    Fault(process_faults.kill_clients, server=ATTACKED),
    Fault(client_faults.disconnect, server=ATTACKED),
    Fault(machine_faults.set_the_clock, server=ATTACKED),
]
"""To mix with attacks."""
