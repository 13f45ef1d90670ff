"""The status page in a real browser, and `bngrad top` in a terminal."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.monitoring.conftest import HTTP, call_by_every_transport, get, http_of, status_of, tool
from tests.servers import wait_until

from bngrad_cli.embedded import EmbeddedServer
from bngrad_cli.main import main as command_line
from bngrad_server.telemetry.metrics import STAGES


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """The URL of a server under a steady mix of calls, since only the last minute is shown."""
    with EmbeddedServer(options=HTTP) as server, ThreadPoolExecutor(1) as threads:
        http, stopping = http_of(server), threading.Event()

        def work() -> None:
            while not stopping.wait(0.5):
                call_by_every_transport(server)

        working = threads.submit(work)
        wait_until(lambda: (status_of(http)["recent"] or {"answered": 0})["answered"] >= 9)  # every kind of call
        yield http
        stopping.set()
        working.result()


@pytest.fixture(scope="module")
def page(busy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's DOM a few seconds after Chromium has opened it."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom")
    profile = f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"
    command = [tool("chromium"), *options, profile, f"{busy}/"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.parametrize(
    "words",
    [
        '<span id="state" class="good" role="status">Ready</span>',
        "cpu:0",
        "GradV2",
        "shared",
        "INVALID_ARGUMENT",
        "epsilon must be finite",
        'aria-label="Latency histogram: 50 % within',
        "<i></i>compute <b>",
    ],
)
def test_the_page_shows_what_the_server_does(page: str, words: str) -> None:
    plain = re.sub(r' style="[^"]*"', "", page)
    assert words in plain


def title_of(http: str, status: dict[str, Any], script: str, folder: Path, width: int) -> str:
    """Returns the title that a script gives to the page once it shows a status in a window of this width."""
    script = f"draw({json.dumps(status)}); document.title = {script};</script>"
    (folder / "page.html").write_text(get(f"{http}/").text.replace("poll();\n</script>", script))
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},1500", "--dump-dom")
    command = [tool("chromium"), *options, f"--user-data-dir={folder / 'profile'}", f"file://{folder}/page.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    return "".join(re.findall("<title>(.*?)</title>", shown, re.DOTALL)[0].split())


@pytest.mark.parametrize("width", [1050, 1300, 1920])
def test_every_count_of_requests_is_in_sight(http: str, tmp_path: Path, width: int) -> None:
    status = json.loads(get(f"{http}/status.json").text)
    status["server"]["requests"] = [["BatchNormTrainingBackprop", "shared", "RESOURCE_EXHAUSTED", 1_234_567]]
    table = 'byId("requests").closest(".scroll")'
    script = f'byId("requests").innerText + ": " + ({table}.scrollWidth - {table}.clientWidth)'
    title = title_of(http, status, script, tmp_path, width)
    assert title == "BatchNormTrainingBackpropsharedRESOURCE_EXHAUSTED1,234,567:0"


@pytest.mark.parametrize("width", [500, 1300])
def test_the_labels_of_the_histogram_stand_apart(busy: str, tmp_path: Path, width: int) -> None:
    status = json.loads(get(f"{busy}/status.json").text)
    status["recent"]["counts"][:20] = [0, 0, *[1] * 18]
    labels = '[...byId("histogram").querySelectorAll("text[text-anchor=middle]")].map((t) => t.getBoundingClientRect())'
    script = f"{labels}.map((box, k, all) => k ? Math.round(box.left - all[k - 1].right) : 99).join()"
    gaps = [int(gap) for gap in title_of(busy, status, script, tmp_path, width).split(",")]
    assert len(gaps) > 2
    assert min(gaps) > 4


def test_the_page_loads_nothing_from_other_hosts(http: str) -> None:
    answer = get(f"{http}/")
    without_namespace = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"\s//.*", "", without_namespace)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_data_of_clients_is_shown_as_text_and_never_as_markup(http: str) -> None:
    page = get(f"{http}/").text
    assert "innerHTML" not in page
    assert "insertAdjacentHTML" not in page
    assert "document.write" not in page


def test_top_shows_the_same_in_a_terminal(busy: str) -> None:
    result = CliRunner().invoke(command_line, ["top", busy, "--once"])
    assert result.exit_code == 0, result.output
    for words in ("ready", "cpu:0", "last minute", "compute", "INVALID_ARGUMENT", "requests/s", "arena", "restarts"):
        assert words in result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(" front ") for line in lines)
    assert any(all(name in line for name in STAGES) for line in lines)
    assert [line for line in lines if "…" in line and not line.lstrip().startswith(("cpu:", "front "))] == []


def test_top_prints_json_for_scripts(http: str) -> None:
    result = CliRunner().invoke(command_line, ["top", http.removeprefix("http://"), "--json"])
    assert json.loads(result.output)["server"]["requests"] == status_of(http)["server"]["requests"]


def test_top_explains_an_address_that_does_not_answer(tmp_path: Path) -> None:
    result = CliRunner().invoke(command_line, ["top", "127.0.0.1:1", "--once"])
    assert result.exit_code == 1
    assert "cannot read http://127.0.0.1:1/status.json: " in result.output
    assert "start the server with --http HOST:PORT" in result.output


def test_top_explains_an_answer_of_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer_in_binary, args=(listener,)).start()
        result = CliRunner().invoke(command_line, ["top", f"127.0.0.1:{listener.getsockname()[1]}", "--once"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "it is not an HTTP port of bngrad; start the server with --http HOST:PORT" in result.output


def _answer_in_binary(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"\0\0\6\4\0\0\0\0\0\0\5\0\0\x40\0\n")
