"""The proxy in a process of its own, and stand-ins for the servers behind it, for the tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from kvplug_testing import peers
from kvplug_testing.waits import until

HOST = "127.0.0.1"
WAIT_S = 60.0
"""For what takes a moment, unless the machine is busy."""
LIFE_S = 300.0
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the proxy of vLLM's tests for its NIXL connector sends."""
STANDIN = f"{Path(__file__).parent}/standin.py:serve"


class Standin:
    """A stand-in for a vLLM server, in a process of its own."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """Also once more, at the same port."""
        if self.port:
            self.peer.close()
        self.peer = peers.start(STANDIN, self.port, timeout_s=LIFE_S)
        self.port = self.peer.recv(timeout=WAIT_S)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def behave(self, **how: Any) -> None:
        self.peer.send(json.dumps(how))
        assert self.peer.recv(timeout=WAIT_S) == "done"

    def go_on(self) -> None:
        self.peer.send("go on")

    @property
    def seen(self) -> list[dict[str, Any]]:
        self.peer.send("seen")
        found: list[dict[str, Any]] = json.loads(self.peer.recv(timeout=WAIT_S))
        return found


class Proxy:
    """The proxy's process. Leaving the ``with`` block kills it."""

    def __init__(self, prefill: list[str], decode: list[str], options: dict[str, str]) -> None:
        with socket.socket() as sock:
            sock.bind((HOST, 0))
            self.port = int(sock.getsockname()[1])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the proxy
        command = [sys.executable, "-m", "kvplug_vllm.proxy", "--port", str(self.port)]
        command += ["--prefill", *prefill, "--decode", *decode]
        for name, value in options.items():
            command += [f"--{name}", value]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )

    @property
    def log(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        return os.pread(self._log.fileno(), end, 0).decode("utf-8", "replace")

    @property
    def most_memory(self) -> int:
        """The most bytes of memory that its process has had."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

    def open(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
        """The answer's connection and head."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=WAIT_S)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        return connection

    def ask(self, body: Any = None, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """The status and the JSON of an answer to a body: bytes, or what is sent as JSON; ``None``: GET."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self.open("GET" if body is None else "POST", path, raw, **headers)) as asked:
            answer = asked.getresponse()
            return answer.status, json.loads(answer.read())

    @property
    def status(self) -> Any:
        code, said = self.ask(path="/status")
        assert code == 200
        return said

    def is_up(self, standin: Standin) -> bool:
        said = self.status
        (found,) = {each["is_up"] for each in said["prefill"] + said["decode"] if each["url"] == standin.url}
        return bool(found)

    def wait_until_ready(self) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, self.log
            with contextlib.suppress(OSError):
                return bool(self.status)
            return False

        until(answers, WAIT_S, "the proxy's answer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextlib.contextmanager
def setup(
    prefill: int, decode: int, options: dict[str, str]
) -> Iterator[tuple[Proxy, list[Standin], list[Standin]]]:
    """A proxy with so many stand-ins behind it."""
    with contextlib.ExitStack() as stack:
        standins = [Standin() for _ in range(prefill + decode)]
        for standin in standins:
            stack.callback(lambda standin=standin: standin.peer.close())
        urls = [standin.url for standin in standins]
        proxy = stack.enter_context(Proxy(urls[:prefill], urls[prefill:], options))
        proxy.wait_until_ready()
        yield proxy, standins[:prefill], standins[prefill:]
