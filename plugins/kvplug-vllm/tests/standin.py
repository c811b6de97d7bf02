"""A server for the tests of the proxy: it answers as it is told, and computes nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvplug_testing import peers

USUAL = {"health": 200, "status": 200, "delay_s": 0.0, "params": None, "pieces": 3, "holds": False}
"""``holds``: it sends each piece of a stream but the first when it is told to go on."""
WAIT_S = 60.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int) -> None:
        self.behaviour: dict[str, Any] = dict(USUAL)
        self.seen: list[dict[str, Any]] = []
        self.goes_on = threading.Semaphore(0)
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(self.server.behaviour["health"], b"")
        else:
            self._answer(200, b'{"data": [{"id": "demo"}]}')

    def do_POST(self) -> None:
        behaviour = dict(self.server.behaviour)
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        request = {"path": self.path, "raw": raw.decode(), "aborted": False, "headers": dict(self.headers)}
        self.server.seen.append(request)
        try:
            time.sleep(behaviour["delay_s"])
            if behaviour["status"] != 200:
                self._answer(behaviour["status"], b'{"error": {"message": "as told"}}')
            elif json.loads(raw).get("stream"):
                self._stream(behaviour)
            else:
                answer = {"who": os.getpid(), "kv_transfer_params": behaviour["params"]}
                self._answer(200, json.dumps(answer).encode())
        except ConnectionError:
            request["aborted"] = True
            self.close_connection = True

    def _stream(self, behaviour: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(behaviour["pieces"]):
            if number and behaviour["holds"]:
                assert self.server.goes_on.acquire(timeout=WAIT_S)
            self._chunk(f"data: {number}\n\n".encode())
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def serve(parent: peers.Parent, port: int) -> None:
    """Serve at the port (0: any, which it sends), and follow orders."""
    server = _Server(port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parent.send(server.server_address[1])
    while True:
        order = parent.recv(timeout=None)
        if order == "seen":
            parent.send(json.dumps(server.seen))
        elif order == "go on":
            server.goes_on.release()
        else:
            server.behaviour |= json.loads(order)
            parent.send("done")
