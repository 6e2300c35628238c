"""An HTTP server on loopback that takes messages, or does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """An HTTP server that keeps what it is sent; `code` is its answer, None makes it hang."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[Any] = []
        self.code: int | None = 200
        self.location = ""
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/T0-SECRET-PATH"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.code is None:
            self.server.released.wait(30)
            return
        if self.server.code == 200:
            self.server.bodies.append(json.loads(body) if body else None)
        self.send_response(self.server.code)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def receive() -> Iterator[Receiver]:
    """Serve until the context ends."""
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
