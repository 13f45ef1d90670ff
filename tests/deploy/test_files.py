"""Compose files and Kubernetes manifests are valid and agree with the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bngrad_cli import settings
from bngrad_server.config import ServerConfig, setting_name
from bngrad_server.rpc.servicer import SERVICE

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
SCHEMAS = Path(__file__).parent / "schemas"
OVERLAYS = ("cpu", "gpu", "secure", "autoscaled", "gateway")
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))
VARIABLES = {settings.variable(setting_name(name)) for name in ServerConfig.model_fields}
NAME = {"app.kubernetes.io/name": "bngrad"}


def validate(resource: dict[str, Any]) -> None:
    """Checks a resource against the schema of its kind, for unknown fields too."""
    import jsonschema  # type: ignore[import-untyped]  # noqa: PLC0415 - takes seconds, also where these tests do not run
    import kubernetes_validate  # noqa: PLC0415

    path = SCHEMAS / f"{resource['kind'].lower()}.json"
    if path.exists():
        jsonschema.validate(resource, closed(json.loads(path.read_text())))
    else:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def closed(schema: Any) -> Any:
    """Returns a schema that refuses fields which it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closing = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {**closing, **{name: closed(each) for name, each in schema.items()}}


def rendered(overlay: str) -> dict[str, Any]:
    """Returns the resources of an overlay by kind, as kubectl would send them."""
    if shutil.which("kubectl") is None and not os.environ.get("BNGRAD_REQUIRE_KUBECTL"):
        pytest.skip("overlays are rendered by kubectl, which is not here")
    command = ["kubectl", "kustomize", str(DOCKER / "kubernetes" / overlay)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {resource["kind"]: resource for resource in yaml.safe_load_all(output)}


def base() -> dict[str, Any]:
    """Returns the resources of the base, unchanged."""
    folder = DOCKER / "kubernetes" / "base"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return {each["kind"]: each for each in (yaml.safe_load((folder / name).read_text()) for name in names)}


def server(resources: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = resources["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    return container


def test_compose_files_follow_the_schema_of_compose() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, COMPOSE)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_mounts_existing_files(path: Path) -> None:
    for name, service in yaml.safe_load(path.read_text())["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./") and source != "./secrets":
                assert (DOCKER / source).exists(), f"{name} mounts {source}"


def test_every_resource_follows_the_schema_of_its_kind() -> None:
    for resource in base().values():
        validate(resource)
    for name in ("autoscaled/scaled-object", "gateway/gateway", "gateway/grpc-route"):
        validate(yaml.safe_load((DOCKER / "kubernetes" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_follows_the_schemas(overlay: str) -> None:
    resources = rendered(overlay)
    assert resources.keys() >= base().keys()
    assert server(resources)["image"].startswith("bngrad:")
    for resource in resources.values():
        validate(resource)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ScaledObject", ("spec", "maxReplicas"), 8),
        ("ScaledObject", ("spec", "maxReplicaCount"), "eight"),
        ("GRPCRoute", ("spec", "rules", 0, "backendRefs", 0, "port"), 65536),
        ("Gateway", ("spec", "listeners", 0, "tls", "certificates"), []),
    ],
)
def test_a_schema_refuses_what_it_does_not_know(kind: str, path: tuple[str | int, ...], value: object) -> None:
    import jsonschema  # noqa: PLC0415

    resource = rendered("autoscaled" if kind == "ScaledObject" else "gateway")[kind]
    *parents, last = path
    owner: Any = resource
    for parent in parents:
        owner = owner[parent]
    owner[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(resource)


def test_the_autoscaler_reads_a_metric_of_the_server_and_has_the_replicas_to_itself() -> None:
    resources = rendered("autoscaled")
    scaled = resources["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == resources["Deployment"]["metadata"]["name"]
    assert "replicas" not in resources["Deployment"]["spec"]
    (trigger,) = scaled["triggers"]
    (metric,) = re.findall(r"\bbngrad_\w+", trigger["metadata"]["query"])
    assert f"| `{metric}` |" in (DOCKER.parent / "docs" / "observability.md").read_text()


def test_the_gateway_routes_every_service_to_the_servers() -> None:
    resources = rendered("gateway")
    gateway, route = resources["Gateway"], resources["GRPCRoute"]["spec"]
    (listener,) = gateway["spec"]["listeners"]
    assert route["parentRefs"] == [{"name": gateway["metadata"]["name"], "sectionName": listener["name"]}]
    assert route["hostnames"] == [listener["hostname"]]
    (rule,) = route["rules"]
    assert {match["method"]["service"] for match in rule["matches"]} == {SERVICE.full_name, "grpc.health.v1.Health"}
    (backend,) = rule["backendRefs"]
    service = resources["Service"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}
    assert {"name": "BNGRAD_ADVERTISE_STREAM", "value": "none"} in server(resources)["env"]


def test_one_overlay_adds_a_gpu_and_another_one_secrets() -> None:
    assert server(rendered("gpu"))["resources"]["limits"]["nvidia.com/gpu"] == 1
    secure = server(rendered("secure"))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):  # those of gRPC speak no TLS
        assert "httpGet" in secure[probe]
        assert "grpc" not in secure[probe]


def test_every_selector_matches_the_servers_pods() -> None:
    resources = base()
    pod = resources["Deployment"]["spec"]["template"]
    assert pod["metadata"]["labels"] == NAME
    assert resources["Deployment"]["spec"]["selector"]["matchLabels"] == NAME
    assert resources["Service"]["spec"]["selector"] == NAME
    assert resources["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == NAME
    assert resources["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == NAME
    ports = {port["name"] for port in server(resources)["ports"]}
    assert {port["targetPort"] for port in resources["Service"]["spec"]["ports"]} == ports


def test_a_pod_has_time_to_drain() -> None:
    resources = base()
    variables = {each["name"]: each["value"] for each in server(resources)["env"]}
    wait_s = int(server(resources)["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = resources["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert wait_s + float(variables["BNGRAD_DRAIN_TIMEOUT"]) < grace_s
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["server"]
    assert ServerConfig.model_fields["drain_timeout_s"].default < int(compose["stop_grace_period"].removesuffix("s"))


def settings_used() -> Iterator[tuple[str, str]]:
    """Returns the settings that files name, each with the file's name."""
    for path in (*DOCKERFILES, *DOCKER.rglob("*.yaml")):
        text = re.sub(r"#.*", "", path.read_text())
        for name in re.findall(r"\bBNGRAD_\w+", text):
            yield name, path.name


def test_every_setting_in_a_file_exists() -> None:
    used = list(settings_used())
    assert used
    for name, path in used:
        assert name in VARIABLES, f"{path} sets {name}"
