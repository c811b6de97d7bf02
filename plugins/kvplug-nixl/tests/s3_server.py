"""A real S3 server on loopback: moto, in a process of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from server_process import ServerProcess, free_port

__all__ = ["ACCESS_KEY", "BUCKET", "SECRET_KEY", "S3Server", "free_port"]

BUCKET: Final = "pages"
ACCESS_KEY: Final = "id-of-the-key"
SECRET_KEY: Final = "secret-of-the-key"
MISSING: Final = [name for name in ("moto", "boto3", "flask") if importlib.util.find_spec(name) is None]


class S3Server(ServerProcess):
    """One server with one bucket, in memory."""

    def __init__(self, folder: Path) -> None:
        """Skips the test where moto is missing."""
        if MISSING:
            pytest.skip(f"there is no S3 server: {', '.join(MISSING)} missing, pip install 'moto[server]'")
        port, secret = free_port(), folder / "secret"
        secret.write_text(SECRET_KEY + "\n")
        self.options: dict[str, Any] = {
            "bucket": BUCKET,
            "endpoint": f"http://127.0.0.1:{port}",
            "access_key": ACCESS_KEY,
            "secret_key_file": str(secret),
        }
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        super().__init__(folder, command, port)

    def start(self) -> None:
        super().start()
        self.client().create_bucket(Bucket=BUCKET)

    def client(self) -> Any:
        """Another S3 client, which sees what NIXL has written."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.options["endpoint"],
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
