"""The example proxy in a process of its own, and stand-ins for the servers behind it, for the tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_engines import HOST
from vllm_servers import ServerProcess

WAIT_S = 60.0
"""For what takes a moment, unless the machine is busy."""
PROGRAM = Path(__file__).parents[3] / "docs/examples/vllm_proxy.py"
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the proxy of vLLM's tests for its NIXL connector sends."""


class Standin(ThreadingHTTPServer):
    """A server in this process that answers as the test says, and computes nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.url = f"http://{HOST}:{self.server_address[1]}"
        self.status = 200
        self.delay_s = 0.0
        self.params: Any = None
        self.seen: list[dict[str, Any]] = []
        self.num_pieces = 3
        """Of a stream."""
        self.may_send = threading.Semaphore(3)
        """Acquired before each piece."""
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that is broken is no error here."""


class _Handler(BaseHTTPRequestHandler):
    server: Standin
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        standin = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = {"path": self.path, "body": body, "is_aborted": False, "headers": dict(self.headers)}
        standin.seen.append(request)
        threading.Event().wait(standin.delay_s)
        try:
            if body.get("stream"):
                self._stream()
            else:
                said = json.dumps({"kv_transfer_params": standin.params}).encode()
                self.send_response(standin.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
        except ConnectionError:
            request["is_aborted"] = self.close_connection = True

    def _stream(self) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(self.server.num_pieces + 1):
            data = f"data: {number}\n\n".encode() if number < self.server.num_pieces else b""
            if data:
                self.server.may_send.acquire()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


class Proxy(ServerProcess):
    """The proxy's process. Leaving the ``with`` block kills it."""

    def __init__(self, prefill: list[str], decode: list[str], options: dict[str, str]) -> None:
        with socket.socket() as sock:
            sock.bind((HOST, 0))
            port = int(sock.getsockname()[1])
        given = {"prefill": prefill, "decode": decode, **options}
        super().__init__([str(PROGRAM)], port, given, {}, deadline_s=WAIT_S)

    @contextlib.contextmanager
    def open(self, path: str, body: Any, **headers: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=WAIT_S)) as connection:
            connection.request("POST", path, raw, {"Content-Type": "application/json", **headers})
            yield connection.getresponse()

    def ask(self, body: Any) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        with self.open("/v1/completions", body) as answer:
            return answer.status, answer.read()


@contextlib.contextmanager
def setup(
    num_prefill: int, num_decode: int, **options: str
) -> Iterator[tuple[Proxy, list[Standin], list[Standin]]]:
    """A proxy with so many stand-ins behind it."""
    with contextlib.ExitStack() as stack:
        standins = [Standin() for _ in range(num_prefill + num_decode)]
        for standin in standins:
            stack.callback(standin.kill)
        urls = [standin.url for standin in standins]
        proxy = stack.enter_context(Proxy(urls[:num_prefill], urls[num_prefill:], options))
        proxy.wait_until_ready()
        yield proxy, standins[:num_prefill], standins[num_prefill:]
