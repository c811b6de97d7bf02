"""A real etcd on loopback."""

from __future__ import annotations

import subprocess
from pathlib import Path

from prerequisites import ETCD
from server_process import ServerProcess, free_port


class EtcdServer(ServerProcess):
    """One server."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        """Skip the test if etcd is not installed.

        Args:
            options: more of its command line.
            scheme: "https" where the options turn TLS on.
        """
        path = ETCD.path_or_skip()
        known = subprocess.run([path, "--help"], capture_output=True, text=True)
        if "--unsafe-no-fsync" in known.stdout + known.stderr:  # since 3.5; a busy disk takes seconds
            options += ("--unsafe-no-fsync",)
        port = free_port()
        peers, clients = f"http://127.0.0.1:{free_port()}", f"{scheme}://127.0.0.1:{port}"
        command = [path, "--name=one", f"--data-dir={folder / 'data'}", f"--initial-cluster=one={peers}"]
        command += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
        command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}", *options]
        super().__init__(folder, command, port)
