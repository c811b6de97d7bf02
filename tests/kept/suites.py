"""The kept plugins, judged by the conformance kit. This file is run where they are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvplug_testing import PipeContract, SinkContract, StoreContract


class TestKeptTransport(PipeContract):
    transport = "kept-transport"


class TestKeptStore(StoreContract):
    store = "kept-store"


class TestKeptSink(SinkContract):
    sink = "kept-sink"

    @pytest.fixture(autouse=True)
    def _a_file_of_the_test(self, tmp_path: Path) -> None:
        self.options = {"path": str(tmp_path / "lines")}
        self.lines = tmp_path / "lines"

    def counted(self, op: str) -> float:
        lines = self.lines.read_text() if self.lines.exists() else ""
        return sum(map(float, re.findall(rf"'{op}': (\d+)", lines)))
