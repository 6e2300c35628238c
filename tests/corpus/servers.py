"""Servers on loopback: HTTP with faults on request, and moto's S3."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipway.corpus.remotes import s3_client


@dataclass
class ServedFile:
    """A file of the server, and what goes wrong with it.

    Attributes
    ----------
    ranges, validators, weak
        Three flags: the server knows `Range`, it names an ETag, and the ETag is a weak one.
    ignores_conditions
        True if it sends ranges whatever `If-Range` says.
    drop_after
        Bytes after which each response of the list ends; when it is empty, responses are whole.
    statuses
        Statuses of the next responses, with their `Retry-After`.
    error
        Text of those responses.
    announced
        Bytes that `Content-Length` adds to the true length; None if it is not sent.
    chunk, pause
        Bytes sent at a time, and seconds after each.
    raw
        The whole answer, sent as it is.
    redirect
        Address that responses redirect to.
    user
        Expected in the header `Authorization`.
    """

    content: bytes
    ranges: bool = True
    validators: bool = True
    weak: bool = False
    ignores_conditions: bool = False
    drop_after: list[int] = field(default_factory=list)
    statuses: list[tuple[int, str | None]] = field(default_factory=list)
    error: str = ""
    announced: int | None = 0
    chunk: int = 1 << 16
    pause: float = 0.0
    # Files with the same barrier are sent in step, until one of them is over.
    barrier: threading.Barrier | None = None
    raw: bytes | None = None
    redirect: str | None = None
    user: str | None = None

    @property
    def etag(self) -> str:
        tag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        return f"W/{tag}" if self.weak else tag


class FaultyServer(ThreadingHTTPServer):
    """A web server whose files fail as the test says. It counts requests and the bytes that it sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, ServedFile] = {}
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.headers: dict[str, list[dict[str, str]]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, content: bytes, **faults: Any) -> str:
        """Serve a file; return its URL."""
        self.files[f"/{name}"] = ServedFile(content, **faults)
        return f"{self.address}/{name}"

    def starts(self, name: str) -> list[int]:
        """Return the first byte that each request for a file asked for."""
        ranges = [headers.get("Range", "bytes=0-") for headers in self.headers[f"/{name}"]]
        return [int(value.removeprefix("bytes=").rstrip("-")) for value in ranges]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultyServer

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests[path] += 1
        self.server.headers.setdefault(path, []).append(dict(self.headers))
        served = self.server.files.get(path)
        if served is None:
            self.send_error(404)
        elif served.raw is not None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                for at in range(0, len(served.raw), served.chunk):
                    self.wfile.write(served.raw[at : at + served.chunk])
                    time.sleep(served.pause)
        elif served.statuses:
            status, wait = served.statuses.pop(0)
            self.send_response(status)
            if wait is not None:
                self.send_header("Retry-After", wait)
            self.send_header("Content-Length", str(len(served.error)))
            self.end_headers()
            self.wfile.write(served.error.encode())
        elif served.user is not None and self.headers.get("Authorization") != served.user:
            self.send_error(401)
        elif served.redirect is not None:
            self.send_response(302)
            self.send_header("Location", served.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send(path, served)

    def _send(self, path: str, served: ServedFile) -> None:
        size, start = len(served.content), 0
        if served.validators and self.headers.get("If-None-Match") == served.etag:
            self.send_response(304)
            self.end_headers()
            return
        requested = self.headers.get("Range")
        is_current = self.headers.get("If-Range") in (None, served.etag) or served.ignores_conditions
        if served.ranges and requested and is_current:
            start = int(requested.removeprefix("bytes=").rstrip("-"))
            if start >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        else:
            self.send_response(200)
        if served.announced is not None:
            self.send_header("Content-Length", str(size - start + served.announced))
        if served.validators:
            self.send_header("ETag", served.etag)
        self.end_headers()
        end = min(size, start + served.drop_after.pop(0)) if served.drop_after else size
        try:
            for at in range(start, end, served.chunk):
                if served.barrier is not None:
                    with contextlib.suppress(threading.BrokenBarrierError):
                        served.barrier.wait(60)
                piece = served.content[at : min(end, at + served.chunk)]
                self.server.sent[path] += len(piece)  # the client may look as soon as it has the bytes
                self.wfile.write(piece)
                if served.pause:
                    time.sleep(served.pause)
        finally:
            if served.barrier is not None:
                served.barrier.abort()
        self.close_connection = True


@contextlib.contextmanager
def faulty_server() -> Iterator[FaultyServer]:
    server = FaultyServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Any]:
    """Run moto's S3, and point the environment of this process to it; yield a client.

    Parameters
    ----------
    home
        An empty directory in the place of the user's.
    """
    from moto.server import ThreadedMotoServer

    # Its log goes to stderr.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        # All servers of a process have the same buckets.
        reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset).close()
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        # No request to the address where the role of an instance is.
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3_client.cache_clear()
        client = s3_client(10.0)
        yield client
        client.close()
    finally:
        s3_client.cache_clear()
        server.stop()
