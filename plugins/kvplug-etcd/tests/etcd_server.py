"""A real etcd on loopback."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Final

_START_S: Final = 20.0


class EtcdServer:
    """One server with a folder of its own. It may be ended and started again at the same port."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        """Skip the test if etcd is not installed.

        Args:
            options: more of its command line.
            scheme: "https" where the options turn TLS on.
        """
        from prerequisites import ETCD  # not in the processes that the kit starts

        self._program = ETCD.path_or_skip()
        self._folder, self._options, self._scheme = folder, list(options), scheme
        known = subprocess.run([self._program, "--help"], capture_output=True, text=True)
        if "--unsafe-no-fsync" in known.stdout + known.stderr:  # since 3.5; a busy disk takes seconds
            self._options.append("--unsafe-no-fsync")
        self.port, self._peer_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        peers, clients = f"http://127.0.0.1:{self._peer_port}", f"{self._scheme}://{self.address}"
        command = [self._program, "--name=one", f"--data-dir={self._folder / 'data'}"]
        command += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
        command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        command += [f"--initial-cluster=one={peers}", *self._options]
        with open(self._folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        limit = time.monotonic() + _START_S
        while not self._listens():
            assert self.process.poll() is None and time.monotonic() < limit, self.log()
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
