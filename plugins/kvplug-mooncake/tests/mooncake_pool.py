"""A real mooncake_master on loopback, and holders of segments: processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from server_process import ServerProcess, free_port, listens, stopped

from kvplug_mooncake.probe import probe

__all__ = ["Pool", "free_port", "listens", "stopped"]

SEGMENT_BYTES: Final = 512 << 20


class Pool:
    """One master and its holders. Each may be stopped, killed and, but for the master, replaced."""

    def __init__(
        self, folder: Path, *options: str, holders: int = 1, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Skips the test where Mooncake is missing.

        Args:
            options: more of the master's command line.
        """
        if reason := probe().reason:
            pytest.skip(reason)
        self._folder, self._segment_bytes = folder, segment_bytes
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        program.chmod(0o755)
        port = free_port()
        where = ["--rpc_address=127.0.0.1", f"--rpc_port={port}"]
        where += ["--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
        self.server = ServerProcess(folder, [str(program), *where, *options], port)
        self.address = self.server.address
        self.holders: list[subprocess.Popen[bytes]] = []
        for _ in range(holders):
            self.add_holder()

    @property
    def master(self) -> subprocess.Popen[bytes]:
        return self.server.process

    def add_holder(self) -> subprocess.Popen[bytes]:
        name = f"holder-{len(self.holders)}"
        holder = self.process(
            name, sys.executable, "-c", _HOLDER, self.address, str(self._segment_bytes), pipe=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"0\n", self.log(name)
        self.holders.append(holder)
        return holder

    def process(self, name: str, *command: str, pipe: int | None = None) -> subprocess.Popen[bytes]:
        with open(self._folder / name, "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe or log, stderr=log)

    def log(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")[-3000:]

    def close(self) -> None:
        for process in (*self.holders, self.master):
            process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


_HOLDER: Final = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]), flush=True)
time.sleep(3600)
"""
