"""/metrics, /healthz and /readyz over HTTP, in threads of their own: a busy event loop is visible instead of silent."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from tiermem.errors import ConfigError

_log = logging.getLogger(__name__)
_REQUEST_TIMEOUT_S = 10.0


class Exporter:
    """Serves from construction until `close`. `healthy` and `ready` are called from the server's threads."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        healthy: Callable[[], bool],
        ready: Callable[[], bool],
    ) -> None:
        """Port 0 takes a free one. Raises ConfigError naming host and port where they cannot be had."""
        try:
            self._server = _Server(host, port, _routes(registry, healthy, ready))
        except OSError as error:
            raise ConfigError(
                f"daemon.metrics_port = {port}: {host}:{port} cannot be bound ({error.strerror}); choose another, or 0"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="tiermem-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served, also where 0 was asked for."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving and wait for the server's thread. Idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


_Answer = tuple[HTTPStatus, str, bytes]


def _routes(
    registry: CollectorRegistry, healthy: Callable[[], bool], ready: Callable[[], bool]
) -> dict[str, Callable[[], _Answer]]:
    def probe(check: Callable[[], bool]) -> _Answer:
        status = HTTPStatus.OK if check() else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "text/plain; charset=utf-8", b"ok\n" if status is HTTPStatus.OK else b"not ok\n"

    return {
        "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry)),
        "/healthz": lambda: probe(healthy),
        "/readyz": lambda: probe(ready),
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a scraper that keeps its connection must not hold the daemon's end
    allow_reuse_address = True

    def __init__(self, host: str, port: int, routes: dict[str, Callable[[], _Answer]]) -> None:
        self.routes = routes
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), ConnectionError | TimeoutError):
            return  # the scraper left
        _log.exception("metrics: a request of %s failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            self.send_error(HTTPStatus.NOT_FOUND, explain="there is /metrics, /healthz and /readyz")
            return
        status, content_type, body = route()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("metrics: " + format, *args)
