"""/metrics as Prometheus reads it, and the files that name metrics: alerts, Grafana's dashboard, the documentation."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.monitoring.conftest import HTTP, call, get, http_of, samples, status_of, tool
from tests.servers import BNGRAD, wait_until, workers_of

import bngrad
from bngrad_cli.embedded import EmbeddedServer
from bngrad_server.telemetry.metrics import STAGES

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docker/monitoring"


@pytest.mark.parametrize("transport", ["unary", "stream", "shared"])
def test_requests_are_counted_by_op_transport_and_status(http: str, transport: str) -> None:
    found = samples(http)
    assert found["bngrad_requests_total", ("OK", "FusedBatchNormGradV2", transport)] == 3
    assert found["bngrad_request_seconds_count", (transport,)] == 3
    assert found["bngrad_tensor_bytes_total", (transport,)] == 3 * 3 * 2 * 3 * 3 * 4 * 4
    assert found["bngrad_requests_total", ("INVALID_ARGUMENT", "FusedBatchNormGradV2", transport)] == 1


def test_auto_sends_arrays_through_shared_memory_from_64_kib_on() -> None:
    with EmbeddedServer(device="cpu", options=HTTP) as server, bngrad.Client(server.target) as client:
        scale, mean, variance = np.ones((3, 1), np.float32)
        for shape in ((4, 64, 63, 1), (4, 64, 64, 1), (4, 64, 65, 1)):
            x = np.ones(shape, np.float32)
            client.fused_batch_norm_grad_v2(x, x, scale, mean, variance)
        http = http_of(server)
        wait_until(lambda: sum(row[-1] for row in status_of(http)["server"]["requests"]) == 3)
        found = samples(http)
        assert found["bngrad_requests_total", ("OK", "FusedBatchNormGradV2", "shared")] == 2
        assert found["bngrad_requests_total", ("OK", "FusedBatchNormGradV2", "unary")] == 1


def test_what_the_front_process_computes_keeps_it_busy() -> None:
    with EmbeddedServer(device="cpu", options=HTTP) as server, bngrad.Client(server.target) as client:
        http = http_of(server)

        def is_busy() -> bool:
            call(client)
            points = status_of(http)["points"]
            return bool(points) and points[-1]["busy"]["front"] > 0

        wait_until(is_busy)
        found = samples(http)
        assert found["bngrad_event_loop_busy_seconds_total", ()] > found["bngrad_front_busy_seconds_total", ()] > 0


def test_requests_that_wait_for_the_event_loop_are_in_the_queue() -> None:
    """More of them than a round of the loop takes; one process alone sends them more slowly than they are computed."""
    with EmbeddedServer(device="cpu", options=HTTP) as server, ExitStack() as clients:
        http = http_of(server)
        command = [*BNGRAD, "bench", server.target, "--transport", "stream", "--layer", "tiny"]
        for _ in range(3):
            options = ("--concurrency", "16", "--seconds", "1000")
            client = clients.enter_context(subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL))
            clients.callback(client.kill)
        wait_until(lambda: samples(http)["bngrad_queue_requests", ()] > 16)
        clients.close()
        wait_until(lambda: samples(http)["bngrad_queue_requests", ()] == 0)


def test_the_stages_add_up_to_the_time_of_the_requests(http: str) -> None:
    found = samples(http)
    stages = sum(found["bngrad_stage_seconds_sum", (stage,)] for stage in STAGES)
    requests = sum(found["bngrad_request_seconds_sum", (transport,)] for transport in ("unary", "stream", "shared"))
    assert stages == pytest.approx(requests, rel=1e-9)
    assert all(found["bngrad_stage_seconds_count", (stage,)] == 9 for stage in STAGES)
    assert found["bngrad_batch_requests_sum", ()] == 9


def busy_s(http: str) -> float:
    seconds: float = status_of(http)["server"]["devices"][0]["busy_s"]
    return seconds


def test_dead_workers_and_rerun_jobs_are_counted() -> None:
    with EmbeddedServer(options=(*HTTP, "--workers", "1")) as server, bngrad.Client(server.target) as client:
        http = http_of(server)
        call(client)
        wait_until(lambda: busy_s(http) > 0)  # the HTTP process's data is up to 0.2 s old
        busy = busy_s(http)
        workers_of(server.process.pid)[0].kill()
        call(client)
        wait_until(lambda: samples(http)["bngrad_workers_ready", ()] == 1)
        answered = ("bngrad_requests_total", ("OK", "FusedBatchNormGradV2", "unary"))
        wait_until(lambda: samples(http)[answered] == 2)  # counted after the answer was sent
        found = samples(http)
        assert found["bngrad_worker_restarts_total", ("cpu",)] == 1
        assert found["bngrad_device_busy_seconds_total", ("cpu",)] > busy > 0


def test_process_metrics_are_those_of_the_front_process(watched: EmbeddedServer, http: str) -> None:
    front = psutil.Process(watched.process.pid)
    assert samples(http)["process_start_time_seconds", ()] == pytest.approx(front.create_time(), abs=5)
    wait_until(lambda: abs(samples(http)["process_open_fds", ()] - front.num_fds()) <= 4)


def test_openmetrics_is_served_on_request(http: str) -> None:
    answer = get(f"{http}/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("version", ["abc", "1.a"])
@pytest.mark.parametrize("media_type", ["application/openmetrics-text", "text/plain"])
def test_a_version_that_is_no_number_gets_the_default_format(http: str, media_type: str, version: str) -> None:
    answer = get(f"{http}/metrics", accept=f"{media_type};version={version}")
    assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, "text/plain")


def test_promtool_accepts_our_metrics(http: str) -> None:
    metrics = get(f"{http}/metrics").text
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=metrics, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "what", ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"]
)
def test_promtool_accepts_our_files(what: str) -> None:
    *command, name = what.split()
    path = Path(__file__).parent / name if name == "alerts_test.yml" else MONITORING / name
    checked = subprocess.run([tool("promtool"), *command, path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:bngrad|process)_[a-z_]+", text))


def grafana_queries() -> Iterator[str]:
    dashboard = json.loads((MONITORING / "grafana/dashboards/bngrad.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["query"]["query"]


def test_alerts_and_dashboard_name_only_existing_metrics(http: str) -> None:
    there = {name for name, _ in samples(http)}
    alerts = names_in((MONITORING / "alerts.yml").read_text())
    assert len(alerts) > 5
    assert alerts <= there
    shown = names_in(" ".join(grafana_queries()))
    assert shown <= there
    assert {name for name in there if name.endswith("_busy_seconds_total")} <= shown


def test_the_documentation_names_every_metric_and_no_other(http: str) -> None:
    text = (ROOT / "docs/observability.md").read_text()
    documented = set(re.findall(r"^\| `(bngrad_[a-z_]+)", text, re.MULTILINE))
    families = text_string_to_metric_families(get(f"{http}/metrics").text)
    there = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if family.name.startswith("bngrad")
    }
    assert documented == there


@pytest.fixture(scope="module")
def prometheus(http: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Prometheus with our configuration, except for the server's address."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = (MONITORING / "prometheus.yml").read_text()
    config = config.replace("server:9464", http.removeprefix("http://")).replace("10s", "1s")
    (directory / "prometheus.yml").write_text(config)
    (directory / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    command = [tool("prometheus"), *options, "--web.listen-address=127.0.0.1:0"]
    log_path = directory / "log"
    with log_path.open("w") as log, subprocess.Popen(command, stderr=log, cwd=directory) as process:
        try:
            port = re.compile(r"Listening on.*address=127\.0\.0\.1:(\d+)")
            wait_until(lambda: port.search(log_path.read_text()) is not None)
            found = port.search(log_path.read_text())
            assert found is not None
            url = f"http://127.0.0.1:{found[1]}"
            wait_until(lambda: get(f"{url}/-/ready").status == 200)
            yield url
        finally:
            process.terminate()


def query(prometheus: str, expression: str) -> list[float]:
    answer = get(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    results = json.loads(answer.text)["data"]["result"]
    return [float(result["value"][1]) for result in results]


def is_answered_by(prometheus: str, expression: str, expected: float) -> bool:
    return query(prometheus, expression) == [expected]


def test_a_real_prometheus_scrapes_the_server(prometheus: str) -> None:
    slowest = "histogram_quantile(1, sum by (le) (bngrad_request_seconds_bucket))"
    for expression, expected in {
        "bngrad_ready": 1,
        'up{job="bngrad"}': 1,
        'sum(bngrad_requests_total{code="OK"})': 9,
        f"0 < {slowest} < bool 60": 1,
    }.items():  # a scrape that took too long leaves none until the next one
        wait_until(partial(is_answered_by, prometheus, expression, expected))


def test_a_real_prometheus_has_an_answer_to_every_query_of_the_dashboard(prometheus: str) -> None:
    for expression in grafana_queries():
        filled = re.sub(r"label_values\((\w+), instance\)", r"\1", expression)
        filled = filled.replace("$__rate_interval", "1m").replace("$instance", ".*")
        if filled.startswith("bngrad_device_memory_used_bytes"):  # of GPUs
            assert query(prometheus, filled) == []
        else:
            wait_until(partial(query, prometheus, filled))  # a rate needs two scrapes
