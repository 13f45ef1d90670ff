"""Runs the deployment with TLS, tokens and Prometheus by podman-compose.

Needs root, podman with runc, networks in which containers know each other's names (netavark with aardvark-dns), the
images that `tests.deploy.image` leaves, and the ports 9090, 9464 and 50051 of this host. Prometheus is Debian's,
so that no registry need be reached; Grafana, which Debian has not, is left out. Run it as ``make image-test``. With
``--engine docker``, a Docker Engine that runs and Docker Compose do it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.deploy.image import BASE, ENGINES, IMAGE, PODMAN, ROOT, Engine, run, say
from tests.security.authority import HOSTS, Authority

from bngrad_wire.token_format import new_token

PROMETHEUS = "localhost/bngrad-test-prometheus"
# What the image of the Prometheus project does, with Debian's package.
DOCKERFILE = f"""
FROM {BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus \\
    && mkdir /prometheus && chown nobody: /prometheus
WORKDIR /prometheus
VOLUME /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""
FILES = ("compose.yaml", "compose.secure.yaml", "compose.monitoring.yaml", "compose.test.yaml")
USER = 10001
PROJECT = "--project-name=bngrad-test"
TIMEOUT_S = 120


def prepare(directory: Path) -> tuple[Path, Path]:
    """Makes the folder ``docker`` as an operator has it; gives files for a client: the authority, and its token."""
    docker, secrets = directory / "docker", directory / "docker" / "secrets"
    shutil.copytree(ROOT / "docker", docker, ignore=shutil.ignore_patterns("secrets"))
    images = {"server": {"image": f"{IMAGE}:cpu"}, "prometheus": {"image": PROMETHEUS}}
    (docker / "compose.test.yaml").write_text(yaml.safe_dump({"services": images}))
    authority = Authority(directory)
    pair = authority.issue(*HOSTS)
    token, line = new_token("trainer")
    secrets.mkdir()
    (directory / "token").write_text(token)
    (secrets / "tokens").write_text(f"{line}\n")
    shutil.copy(pair.certificate, secrets / "server.pem")
    shutil.copy(pair.key, secrets / "server.key")
    for path in (secrets, *secrets.iterdir()):
        os.chown(path, USER, USER)
        path.chmod(0o700 if path.is_dir() else 0o400)
    return authority.path, directory / "token"


@contextmanager
def stack(engine: Engine, docker: Path) -> Iterator[None]:
    """Runs server and Prometheus during the block."""
    files = [argument for name in FILES for argument in ("--file", docker / name)]
    compose: list[object] = ["docker", "compose", PROJECT, *files]
    up = ["up", "--detach", "--no-build"]
    if engine is PODMAN:
        compose = [sys.executable, "-m", "podman_compose", PROJECT, *files, "--podman-args=--runtime=runc"]
        # As in tests.deploy.image; it is podman's bridge that is tried here.
        limits = " ".join(option for option in engine.options if option != "--network=host")
        up.insert(0, f"--podman-run-args={limits}")
    try:
        run(*compose, *up, "server", "prometheus")
        yield
    finally:
        run(*compose, "down", "--volumes", "--timeout=60")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own server's, or Prometheus'
        return json.load(answer)


def wait_for(what: str, look: Callable[[], bool]) -> None:
    """Waits until it answers."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            if look():
                return
        except (OSError, ValueError):  # not listening yet
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {TIMEOUT_S} s")
        time.sleep(0.5)


def query(expression: str) -> float:
    """What Prometheus says it is; 0 where there is nothing."""
    parameters = urllib.parse.urlencode({"query": expression})
    result = get(f"http://localhost:9090/api/v1/query?{parameters}")["data"]["result"]
    return float(result[0]["value"][1]) if result else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="podman", help="what runs containers")
    engine = ENGINES[parser.parse_args().engine]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "Dockerfile").write_text(DOCKERFILE)
        run(*engine.builder, "--tag", PROMETHEUS, directory)
        ca, token = prepare(directory)
        bngrad = [sys.executable, "-m", "bngrad_cli"]
        target = ["localhost:50051", "--tls-ca", ca, "--token-file", token]
        with stack(engine, directory / "docker"):
            wait_for("a ready server", lambda: bool(get("http://localhost:9464/status.json")["server"]["ready"]))
            print(run(*bngrad, "check", *target))
            wait_for("a target that is up", lambda: query('up{job="bngrad"}') == 1)
            rules = [
                rule for group in get("http://localhost:9090/api/v1/rules")["data"]["groups"] for rule in group["rules"]
            ]
            assert rules
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}  # until they are evaluated
            answered = 'sum(bngrad_requests_total{code="OK"})'
            before = query(answered)
            run(*bngrad, "bench", *target, "--layer=tiny", "--seconds=1", "--json")
            wait_for("requests in Prometheus", lambda: query(answered) > before + 10)
            say(f"Prometheus has {len(rules)} alerts, a target that is up, and the requests of bngrad bench")
    print("the stack works")


if __name__ == "__main__":
    main()
