"""A real redis-server or valkey-server on loopback, and at a Unix socket."""

from __future__ import annotations

from pathlib import Path

import pytest
from prerequisites import REDIS
from server_process import ServerProcess, free_port

__all__ = ["RedisServer", "free_port"]


class RedisServer(ServerProcess):
    """One server, without files on the disk."""

    def __init__(self, folder: Path, *options: str, program: str = "server", port: int | None = None) -> None:
        """Skip the test if redis-server is not installed, or lacks TLS that the options ask for.

        Args:
            options: more of its command line, or a file first.
            program: "server" or "sentinel".
            port: default: a free one.
        """
        path = REDIS.path_or_skip()
        self.client = path.replace("-server", "-cli")
        """The path of redis-cli."""
        self.socket = str(folder / "socket")
        self._tls_port = int(options[options.index("--tls-port") + 1]) if "--tls-port" in options else None
        port = free_port(below=55_000) if port is None else port  # a cluster uses the port 10,000 above, too
        own = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        if program == "sentinel":
            own += ["--sentinel"]
        else:
            own += ["--save", "", "--appendonly", "no", "--unixsocket", self.socket]
        super().__init__(folder, [path, *options, *own], port, checked=self._tls_port)

    def start(self) -> None:
        try:
            super().start()
        except AssertionError:
            if self._tls_port and "Bad directive" in self.log():
                pytest.skip("redis-server was built without TLS: apt-get install redis-server")
            raise
