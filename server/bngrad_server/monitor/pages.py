"""The pages of the HTTP port: metrics, health, the dashboard and its data."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Awaitable, Callable, Mapping

from bngrad_server.monitor.history import History
from bngrad_server.monitor.http import Response, text_response
from bngrad_server.monitor.prometheus import Exposition
from bngrad_server.monitor.status_client import FrontGoneError, StatusClient

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}
_STOPPING = "the server is stopping\n"


class Pages:
    """Handles requests by path; answers 503 if a page needs the front process and it is silent."""

    def __init__(self, front: StatusClient, history: History, front_pid: int) -> None:
        self._front = front
        self._history = history
        self._exposition = Exposition(front_pid)
        page = importlib.resources.files("bngrad_server.monitor") / "dashboard.html"
        self._dashboard = Response(200, "text/html; charset=utf-8", page.read_bytes(), _PAGE_HEADERS)
        self._pages: dict[str, Callable[[Mapping[str, str]], Awaitable[Response]]] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status.json": self._status,
        }

    async def answer(self, path: str, headers: Mapping[str, str]) -> Response:
        """Returns the page at a path."""
        if path == "/":
            return self._dashboard
        page = self._pages.get(path)
        if page is None:
            return text_response(404, f"there are / and {', '.join(self._pages)}\n")
        try:
            return await page(headers)
        except TimeoutError:
            return text_response(503, "the server's front process does not answer\n")
        except FrontGoneError:
            return text_response(503, _STOPPING)

    async def _metrics(self, headers: Mapping[str, str]) -> Response:
        return self._exposition.render(await self._front.status(), headers.get("accept", ""))

    async def _healthz(self, headers: Mapping[str, str]) -> Response:
        await self._front.status()
        return text_response(200, "ok\n")

    async def _readyz(self, headers: Mapping[str, str]) -> Response:
        status = await self._front.status()
        if status["ready"]:
            return text_response(200, "ok\n")
        return text_response(503, _STOPPING if status["stopping"] else "no worker is ready\n")

    async def _status(self, headers: Mapping[str, str]) -> Response:
        status = {"server": await self._front.status(), **self._history.status()}
        return Response(200, "application/json", json.dumps(status).encode())
