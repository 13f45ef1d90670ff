"""Builds the container images, and runs the CPU image hardened, as documented.

Needs root, buildah, podman and runc, and debootstrap where no base image is named; no engine runs in the background.
Run it as ``make image-test``. With ``--engine docker``, a Docker Engine that runs does all but make the base.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

import bngrad

ROOT = Path(__file__).parents[2]
BASE = "localhost/bngrad-test-base"
IMAGE = "localhost/bngrad-test"
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
START_TIMEOUT_S = 300
MEMORY_BYTES = 4 << 30
CAREFUL = [
    "--read-only",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    f"--memory={MEMORY_BYTES}",
    "--pids-limit=1000",
]


def run(*command: object, timeout_s: float = 3600) -> str:
    """Runs a command and returns its output; shows all of it on failure."""
    finished = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    if finished.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{finished.stdout}{finished.stderr}")
    return finished.stdout.strip()


@dataclass(frozen=True)
class Engine:
    """A container engine: how to run it, how to build images for it, and what each container needs on this machine."""

    command: tuple[str, ...]
    builder: tuple[str, ...]
    options: tuple[str, ...]

    def __call__(self, *arguments: object) -> str:
        return run(*self.command, *arguments)


PODMAN = Engine(
    ("podman", "--runtime=runc"),
    ("buildah", "build", "--layers", "--isolation=chroot", "--format=docker", "--network=host"),
    # Without limits of its own, podman would raise those of a root that may not do so; its health checks need systemd.
    ("--network=host", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096", "--no-healthcheck"),
)
DOCKER = Engine(("docker",), ("docker", "build", "--network=host"), ("--network=host", "--tmpfs=/tmp"))
ENGINES = {"podman": PODMAN, "docker": DOCKER}


def make_base() -> None:
    """Builds BASE: a small Debian with Python and this host's certificate authorities."""
    with tempfile.TemporaryDirectory() as folder:
        system = Path(folder) / "system"
        run("debootstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv", "bookworm", system)
        shutil.copy(BUNDLE, system / BUNDLE.relative_to("/"))
        (system / "etc/pip.conf").write_text(f"[global]\ncert = {BUNDLE}\n")
        container = run("buildah", "from", "scratch")
        run("buildah", "copy", container, system, "/")
        run("buildah", "config", "--env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        run("buildah", "commit", "--rm", container, BASE)


def build(engine: Engine, dockerfile: str, tag: str, base: str | None) -> None:
    began = time.monotonic()
    on_base = [f"--build-arg=BASE={base}"] if base else []
    run(*engine.builder, *on_base, "--file", dockerfile, "--tag", f"{IMAGE}:{tag}", ".")
    size = json.loads(engine("image", "inspect", f"{IMAGE}:{tag}"))[0]["Size"]
    say(f"{dockerfile}: built in {time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB")


@contextmanager
def container(engine: Engine, *options: str) -> Iterator[tuple[str, str]]:
    """Runs a server in a container during the block, and gives its address."""
    began = time.monotonic()
    settings = ["--env=BNGRAD_LISTEN=127.0.0.1:0,unix:/tmp/bngrad.sock", "--env=BNGRAD_HTTP=127.0.0.1:0"]
    name = engine("run", "--detach", "--ipc=shareable", *engine.options, *CAREFUL, *settings, *options, f"{IMAGE}:cpu")
    try:
        while " ready on " not in (log := engine("logs", name)):
            if engine("inspect", "--format={{.State.Running}}", name) != "true":
                raise SystemExit(f"the server ended: {log}")
            if time.monotonic() > began + START_TIMEOUT_S:
                raise SystemExit(f"the server was not ready after {START_TIMEOUT_S} s: {log}")
            time.sleep(0.1)
        say(f"ready {time.monotonic() - began:.1f} s after the container was started")
        yield name, log.split(" ready on ")[1].split(",")[0]
    finally:
        engine("rm", "--force", name)


def look_inside(engine: Engine, name: str) -> None:
    """Checks that the server runs as nobody and cannot write to its files."""
    assert engine("exec", name, "id", "-u") == "10001"
    assert "Read-only" in engine("exec", name, "sh", "-c", "touch /opt/bngrad/x 2>&1 || true")
    compilers = engine("exec", name, "sh", "-c", "command -v cc gcc g++ clang || true")
    assert compilers == "", compilers
    code = "from bngrad_kernels import machine; print(machine.memory_bytes())"
    limit = engine("exec", name, "python", "-c", code)
    assert int(limit) == MEMORY_BYTES
    say("not root, nothing to write to, no compiler")


def check(engine: Engine, name: str, target: str) -> None:
    """Runs the image's health check, and `bngrad check` from outside."""
    health = json.loads(engine("image", "inspect", "--format={{json .Config.Healthcheck.Test}}", f"{IMAGE}:cpu"))
    engine("exec", name, *health[1:])
    print(run(sys.executable, "-m", "bngrad_cli", "check", target))
    say("the health check passes inside, bngrad check from outside")


SHARE = """
import numpy as np, bngrad
with bngrad.Client("{target}", transport="shared") as client:
    y_backprop, x, x_backprop = (client.empty((32, 56, 56, 256)) for _ in range(3))
    y_backprop.fill(1), x.fill(1)
    ones = np.ones(256, np.float32)
    client.fused_batch_norm_grad_v2(y_backprop, x, ones, ones, ones, out=x_backprop)
    print(f"{{3 * x.nbytes / 1e6:.0f}} MB")
"""


def share_memory(engine: Engine, name: str, target: str) -> None:
    """Shares memory with another container, more than /dev/shm may hold."""
    command = ["--entrypoint=python", f"{IMAGE}:cpu", "-c", SHARE.format(target=target)]
    shared = engine("run", "--rm", *engine.options, *CAREFUL, f"--ipc=container:{name}", *command)
    shm = engine("exec", name, "sh", "-c", "df -h /dev/shm | tail -1").split()[1]
    say(f"{shared} shared with a client in another container, with a /dev/shm of {shm}")


def stop_under_load(engine: Engine, name: str, target: str) -> None:
    """SIGTERM lets the call in flight end; then the server exits with 0."""
    x = np.ones((64, 56, 56, 256), np.float32)
    channels = np.ones(256, np.float32)
    answers = []

    def call() -> None:
        with bngrad.Client(target, retries=False, timeout=60) as client:
            answers.append(client.fused_batch_norm_grad_v2(x, x, channels, channels, channels).x_backprop)

    caller = threading.Thread(target=call)
    caller.start()
    time.sleep(0.3)  # it takes longer than that
    was_in_flight = caller.is_alive()
    engine("stop", "--time=60", name)
    caller.join()
    assert was_in_flight
    assert answers, "the call in flight was not answered"
    assert engine("inspect", "--format={{.State.ExitCode}}", name) == "0"
    say(f"SIGTERM: a call of {2 * x.nbytes / 1e6:.0f} MB was in flight, and answered; exit code 0")


def come_back(engine: Engine) -> None:
    """A background engine reads the health, and restarts a killed server."""
    address = "--env=BNGRAD_LISTEN=127.0.0.1:50051,unix:/tmp/bngrad.sock"
    with container(engine, address, "--health-interval=1s", "--restart=unless-stopped") as (name, target):
        while (health := engine("inspect", "--format={{.State.Health.Status}}", name)) == "starting":
            time.sleep(0.1)
        assert health == "healthy"
        (front,) = psutil.Process(int(engine("inspect", "--format={{.State.Pid}}", name))).children()
        with bngrad.Client(target) as client:
            client.server_info()  # one that knows its server waits for it
            began = time.monotonic()
            front.kill()
            client.server_info(timeout=START_TIMEOUT_S)
            say(f"healthy; killed, and there again after {time.monotonic() - began:.1f} s")


def say(sentence: str) -> None:
    print(f"  {sentence}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="image to build on; without, a small Debian is made, which needs no registry")
    parser.add_argument("--pinned-base", action="store_true", help="build on the images that the Dockerfiles name")
    parser.add_argument("--engine", choices=ENGINES, default="podman", help="what runs containers")
    parser.add_argument("--cuda", action="store_true", help="build docker/Dockerfile.cuda too")
    options = parser.parse_args()
    base = None if options.pinned_base else options.base or BASE
    if base == BASE and not run("buildah", "images", "--quiet", "--filter", f"reference={BASE}"):
        make_base()
    engine = ENGINES[options.engine]
    if base == BASE and engine is DOCKER:
        run("buildah", "push", BASE, f"docker-daemon:{BASE}:latest")
    build(engine, "docker/Dockerfile", "cpu", base)
    if options.cuda:
        build(engine, "docker/Dockerfile.cuda", "cuda", base)
    with container(engine) as (name, target):
        look_inside(engine, name)
        check(engine, name, target)
        share_memory(engine, name, target)
        stop_under_load(engine, name, target)
    with container(engine, "--env=XDG_CACHE_HOME=/tmp"):
        say("... without the kernels that the image brings")
    if engine is DOCKER:
        come_back(engine)
    print("the image works")


if __name__ == "__main__":
    main()
