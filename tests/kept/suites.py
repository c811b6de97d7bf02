"""The kept plugins, judged by the conformance kit. This file is run where they are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvplug_testing import ConnectorContract, PipeContract, SinkContract, StoreContract


class TestKeptTransport(PipeContract):
    transport = "kept-transport"


class TestKeptStore(StoreContract):
    store = "kept-store"


class TestKeptConnector(ConnectorContract):
    connector = "kept-folder"
    injects_into_own = True

    def inject_fault(self, how: str) -> None:
        """How loads fail."""
        from kvplug_kept_connector import folder

        def read(path: Path) -> bytes:
            data = bytearray(path.read_bytes())
            if how and path.suffix:  # a rank's KV
                data[-1] ^= 1
                if how == "fail":
                    raise OSError("the disk is gone")
            return bytes(data)

        folder.READ = read
        self.later(lambda: setattr(folder, "READ", Path.read_bytes))


class TestKeptSink(SinkContract):
    sink = "kept-sink"

    @pytest.fixture(autouse=True)
    def _a_file_of_the_test(self, tmp_path: Path) -> None:
        self.options = {"path": str(tmp_path / "lines")}
        self.lines = tmp_path / "lines"

    def counted(self, op: str) -> float:
        lines = self.lines.read_text() if self.lines.exists() else ""
        return sum(map(float, re.findall(rf"'{op}': (\d+)", lines)))
