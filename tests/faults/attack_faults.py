"""The attacks of `benchmarks.hostile` as faults, for a server that asks for tokens."""

from __future__ import annotations

import subprocess
import sys
import time
from random import Random

from benchmarks.hostile.attacks import ATTACKS
from tests.faults.harness import Fault, Harness

ATTACKED = "attacked"
"""The name of the server for attacks."""


def attack(name: str) -> Fault:
    """Returns an attack, by a process with a token of its own, as a fault; good calls may not fail for its sake."""

    def inject(scene: Harness, seconds: float, rng: Random) -> None:
        service = scene.service
        command = [sys.executable, "-m", "benchmarks.hostile", name, "--target", service.target]
        command += ["--token", service.attackers_token, "--http", service.http]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
            try:
                assert attacker.stdout is not None
                assert attacker.stdout.readline(), f"{name} did not begin"
                time.sleep(seconds)
                assert attacker.poll() is None, f"{name} ended"
                scene.load.wait_for_answers()
            finally:
                attacker.kill()

    inject.__name__ = name
    return Fault(inject, server=ATTACKED)


ATTACK_FAULTS = [attack(name) for name in ATTACKS]
