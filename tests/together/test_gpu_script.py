"""``benchmarks/gpu.py`` without a GPU: over the fake libraries, and with parts that fail."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not (BENCHMARKS / "gpu.py").exists(), reason="the benchmarks are not here"),
]
MEASURED = ("cuda-ipc", "paged", "staged", "to-itself", "all-reduce")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script, imported; and ``script.gpu_parts``, ``script.gpu_programs``."""
    for name in ("torch", "kvplug_cuda_ipc", "kvplug_pynccl"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu")
    for name in ("gpu", "gpu_parts", "gpu_programs", "gpu_children"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=190)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc) for the fakes")
def test_all_that_is_measured_comes_of_the_fakes_too_and_is_called_no_measurement(
    script: Any, tmp_path: Path
) -> None:
    done = run("--fake", "--only", ",".join(MEASURED), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["part"] for row in found["rows"]} == set(MEASURED)
    assert not [row["said"] for row in found["rows"] if row["said"]]
    whats = {(row["what"], row["nbytes"]) for row in found["rows"]}
    assert whats >= {
        ("cuda-ipc, into", 1 << 20),
        ("cuda-ipc, latency", 4096),
        ("copy on the device", 1 << 20),
    }
    shares = [row["of_copy"] for row in found["rows"] if row["gb_per_s"] and "copy" not in row["what"]]
    assert shares and all(shares)
    assert found["facts"]["fake"] is True
    for report in (done.stdout, (tmp_path / "gpu.md").read_text()):
        assert "THESE ARE NO MEASUREMENTS" in report
