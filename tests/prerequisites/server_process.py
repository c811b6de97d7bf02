"""Servers that tests of several plugins start on loopback, each a process with a folder of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_START_S: Final = 60.0


def free_port(below: int = 1 << 16) -> int:
    while True:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            if (port := int(bound.getsockname()[1])) < below:
                return port


def listens(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex((host, port)) == 0


@contextmanager
def stopped(process: subprocess.Popen[Any]) -> Iterator[None]:
    """The process does nothing in the block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


class ServerProcess:
    """A program that listens at a port. It may be ended, and started again at the same one."""

    def __init__(
        self, folder: Path, command: Sequence[str], port: int, *, checked: int | None = None
    ) -> None:
        """``checked``: the port to wait for, by default ``port``."""
        self.port, self.address = port, f"127.0.0.1:{port}"
        self._checked = port if checked is None else checked
        self._command = list(command)
        self._log = folder / f"log-{port}"
        self.start()

    def start(self) -> None:
        """Return once it listens."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        limit = time.monotonic() + _START_S
        while not listens(self._checked):
            assert self.process.poll() is None and time.monotonic() < limit, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """Idempotent, as :meth:`close`."""
        self.process.kill()
        self.process.wait(10)

    close = kill


def certificates(folder: Path, host: str = "127.0.0.1") -> dict[str, str]:
    """Files with the certificate of the host, its key, its authority ("ca"), and a stranger's authority."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert(host)
    files = {name: str(folder / name) for name in ("ca", "cert", "key", "stranger")}
    authority.cert_pem.write_to_path(files["ca"])
    trustme.CA().cert_pem.write_to_path(files["stranger"])
    issued.private_key_pem.write_to_path(files["key"])
    for pem in issued.cert_chain_pems:
        pem.write_to_path(files["cert"], append=True)
    return files
