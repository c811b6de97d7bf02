"""A real S3 server on loopback: moto, in a process of its own."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

_START_S: Final = 60.0
BUCKET: Final = "pages"
ACCESS_KEY: Final = "id-of-the-key"
SECRET_KEY: Final = "secret-of-the-key"
MISSING: Final = [name for name in ("moto", "boto3", "flask") if importlib.util.find_spec(name) is None]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class S3Server:
    """One server with one bucket, in memory. It may be ended, and started again."""

    def __init__(self, folder: Path) -> None:
        """Skips the test where moto is missing."""
        if MISSING:
            pytest.skip(f"there is no S3 server: {', '.join(MISSING)} missing, pip install 'moto[server]'")
        self._log = folder / "log"
        self.port = free_port()
        secret = folder / "secret"
        secret.write_text(SECRET_KEY + "\n")
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.options: dict[str, Any] = {
            "bucket": BUCKET,
            "endpoint": self.endpoint,
            "access_key": ACCESS_KEY,
            "secret_key_file": str(secret),
        }
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        limit = time.monotonic() + _START_S
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            assert self.process.poll() is None and time.monotonic() < limit, self._log.read_text()[-3000:]
            time.sleep(0.05)
        self.client().create_bucket(Bucket=BUCKET)

    def client(self) -> Any:
        """Another S3 client, which sees what NIXL has written."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
