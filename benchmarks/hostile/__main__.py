"""Attacks a server, by the names of attacks, until it is killed or the time is over.

The process has the lowest CPU priority, since real attackers would have their own machine; where it is started with
real-time priority, it takes all that others with such priority leave.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import traceback
from pathlib import Path

from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.victim import DOORS, Victim


def main() -> None:
    listed = "\n".join(f"  {name:24} {attack.description}" for name, attack in ATTACKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile",
        description=__doc__,
        epilog=f"attacks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("attacks", nargs="+", choices=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="the server")
    parser.add_argument("--token", default="", help="the attacker's valid token; none by default")
    parser.add_argument("--ca", metavar="FILE", help="the authority of the server's certificate; no TLS by default")
    parser.add_argument("--http", metavar="HOST:PORT", help="the server's HTTP address")
    parser.add_argument("--victim", type=Path, metavar="FILE", help="all of these, see Victim.save, instead of asking")
    parser.add_argument("--doors", nargs="+", choices=DOORS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    if options.victim is None:
        victim = Victim.discover(options.target, options.token, options.ca, options.http)
    else:
        victim = Victim.load(options.victim)
    _give_way()
    for name in options.attacks:
        _begin(ATTACKS[name], victim, options.doors)
    print("attacking", flush=True)
    deadline = time.monotonic() + options.seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
    os._exit(0)


def _give_way() -> None:
    # With the lowest niceness it would still finish its slice of some milliseconds when a better process wakes.
    if os.sched_getscheduler(0) == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    else:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _begin(attack: Attack, victim: Victim, doors: list[str] | None) -> None:
    for door in doors or attack.doors:
        if door in victim.addresses:
            threading.Thread(target=_run, args=(attack, victim.at(door)), daemon=True).start()


def _run(attack: Attack, victim: Victim) -> None:
    """Attacks; an attack that fails ends the process, or it would seem to do no harm."""
    try:
        attack.run(victim)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
