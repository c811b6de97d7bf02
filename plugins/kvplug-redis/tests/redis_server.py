"""A real redis-server or valkey-server on loopback, or at a Unix socket."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

_START_S: Final = 20.0


def free_port() -> int:
    while True:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            if (port := int(bound.getsockname()[1])) < 55_000:  # a cluster uses the port 10,000 above, too
                return port


class RedisServer:
    """One server with a folder of its own, without files on the disk. It may be ended, and started again."""

    def __init__(self, folder: Path, *options: str, program: str = "server", port: int | None = None) -> None:
        """Skip the test if redis-server is not installed, or lacks TLS that the options ask for.

        Args:
            options: more of its command line, or a file first.
            program: "server" or "sentinel".
            port: default: a free one.
        """
        from prerequisites import REDIS  # not in the processes that the kit starts

        self._program, self._folder, self._options = REDIS.path_or_skip(), folder, options
        self.client = self._program.replace("-server", "-cli")
        """The path of redis-cli."""
        self._is_sentinel = program == "sentinel"
        self.port = free_port() if port is None else port
        self.address = f"127.0.0.1:{self.port}"
        self.socket = str(folder / "socket")
        self.start()

    def start(self) -> None:
        own = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        if self._is_sentinel:
            own += ["--sentinel"]
        else:
            own += ["--save", "", "--appendonly", "no", "--unixsocket", self.socket]
        with open(self._folder / f"log-{self.port}", "ab") as log:
            self.process = subprocess.Popen([self._program, *self._options, *own], stdout=log, stderr=log)
        limit = time.monotonic() + _START_S
        while not self._listens():
            if self._tls_port() and "Bad directive" in self.log():
                self.process.wait(10)
                pytest.skip(f"{self._program} was built without TLS: apt-get install redis-server")
            assert self.process.poll() is None and time.monotonic() < limit, self.log()
            time.sleep(0.02)

    def _listens(self) -> bool:
        port = self._tls_port() or self.port
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    def _tls_port(self) -> int | None:
        at = self._options.index("--tls-port") if "--tls-port" in self._options else -1
        return int(self._options[at + 1]) if at >= 0 else None

    def log(self) -> str:
        return (self._folder / f"log-{self.port}").read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
