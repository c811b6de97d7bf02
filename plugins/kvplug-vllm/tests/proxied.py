"""The proxy in a process of its own, and stand-ins for the servers behind it, for the tests."""

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
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the proxy of vLLM's tests for its NIXL connector sends."""


class Standin:
    """A server in this process that answers as the test says, and computes nothing."""

    def __init__(self) -> None:
        self.port = 0
        self.health = self.status = 200
        self.delay_s = 0.0
        self.params: Any = None
        self.num_pieces = 3
        """Of a stream."""
        self.holds = False
        """It sends each piece of a stream but the first after a call of :meth:`send_next`."""
        self.seen: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        """Also once more, at the same port."""
        self.runs, self.is_killed, self._may_send = (
            threading.Event(),
            threading.Event(),
            threading.Semaphore(0),
        )
        self.runs.set()
        self._server = _Server(self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def stop(self) -> None:
        """It accepts connections, and answers nothing before :meth:`cont`, as after SIGSTOP."""
        self.runs.clear()

    def cont(self) -> None:
        self.runs.set()

    def kill(self) -> None:
        """Its connections break."""
        self.is_killed.set()
        self.runs.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in self._server.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def send_next(self) -> None:
        self._may_send.release()

    def wait_to_send(self) -> None:
        while not self._may_send.acquire(timeout=0.05):
            if self.is_killed.is_set():
                raise ConnectionError


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, standin: Standin) -> None:
        self.standin = standin
        self.connections: list[socket.socket] = []
        super().__init__((HOST, standin.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that is broken is no error here."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        standin = self.server.standin
        standin.runs.wait()
        if self.path == "/health":
            self._answer(standin.health, b"")
        else:
            self._answer(200, b'{"data": [{"id": "demo"}]}')

    def do_POST(self) -> None:
        standin = self.server.standin
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        standin.runs.wait()
        request = {"path": self.path, "raw": raw, "is_aborted": False, "headers": dict(self.headers)}
        standin.seen.append(request)
        try:
            standin.is_killed.wait(standin.delay_s)
            standin.runs.wait()
            if standin.status != 200:
                self._answer(standin.status, b'{"error": {"message": "as the test says"}}')
            elif json.loads(raw).get("stream"):
                self._stream(standin)
            else:
                answer = {"who": standin.port, "kv_transfer_params": standin.params}
                self._answer(200, json.dumps(answer).encode())
        except ConnectionError:
            request["is_aborted"] = self.close_connection = True

    def _stream(self, standin: Standin) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(standin.num_pieces + 1):
            if number and standin.holds and number < standin.num_pieces:
                standin.wait_to_send()
            standin.runs.wait()
            data = b"" if number == standin.num_pieces else f"data: {number}\n\n".encode()
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


class Proxy(ServerProcess):
    """The proxy's process. Leaving the ``with`` block kills it."""

    ready_path = "/status"

    def __init__(self, prefill: list[str], decode: list[str], options: dict[str, str]) -> None:
        with socket.socket() as sock:
            sock.bind((HOST, 0))
            port = int(sock.getsockname()[1])
        given = {"prefill": prefill, "decode": decode, **options}
        super().__init__("kvplug_vllm.proxy", port, given, {}, deadline_s=WAIT_S)

    @property
    def most_memory(self) -> int:
        """The most bytes of memory that its process has had."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

    @contextlib.contextmanager
    def open(self, method: str, path: str, body: Any = None, **headers: str) -> Iterator[Any]:
        """A connection with this request: its body is bytes, or what is sent as JSON."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=WAIT_S)) as connection:
            connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
            yield connection

    def ask(self, body: Any = None, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """The status and the JSON of an answer; without a body, to a GET."""
        with self.open("GET" if body is None else "POST", path, body, **headers) as asked:
            answer = asked.getresponse()
            return answer.status, json.loads(answer.read())

    @property
    def status(self) -> Any:
        code, about = self.ask(path="/status")
        assert code == 200
        return about

    def is_up(self, standin: Standin) -> bool:
        about = self.status
        (found,) = {
            each["is_up"] for each in about["prefill"] + about["decode"] if each["url"] == standin.url
        }
        return bool(found)


@contextlib.contextmanager
def setup(
    num_prefill: int, num_decode: int, options: dict[str, str]
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
