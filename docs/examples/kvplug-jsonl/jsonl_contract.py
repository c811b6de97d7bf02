"""Tests the sink "jsonl" against the laws of sinks, and the plugin against the laws of plugins."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import ClassVar

from kvplug_testing import SinkContract, check_plugin

FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "metrics.jsonl"


class TestJsonl(SinkContract):
    sink = "jsonl"
    options: ClassVar[dict[str, str]] = {"path": str(FILE)}

    def counted(self, op: str) -> float:
        """Return the sum of all lines, so that the kit sees which counts have arrived."""
        lines = FILE.read_text().splitlines() if FILE.exists() else []
        return sum(json.loads(line)["ops"].get(op, {}).get("count", 0) for line in lines)


def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("jsonl") == ()
