"""The folder of a converted model: made once, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvplug_testing.waits import until
from kvplug_transformers.model.cache import make_once

pytestmark = pytest.mark.timeout(60)

MAKER = """
import os, sys, time
from pathlib import Path
from kvplug_transformers.model.cache import make_once

def make(folder):
    with open(sys.argv[2], "a") as log:
        log.write(f"{os.getpid()}\\n")
    (folder / "weights").write_bytes(b"w" * 100_000)
    time.sleep(float(sys.argv[3]))

make_once(Path(sys.argv[1]), make)
"""


def start_maker(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    """A process that makes the folder in this time, and first writes its pid into ``log``."""
    log = folder.parent / "log"
    return subprocess.Popen([sys.executable, "-c", MAKER, str(folder), str(log), str(seconds)])


def test_two_processes_at_once_make_it_once(tmp_path):
    folder = tmp_path / "model"
    makers = [start_maker(folder, 0.5) for _ in range(2)]
    assert [maker.wait(timeout=30) for maker in makers] == [0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1
    assert (folder / "weights").stat().st_size == 100_000


def test_a_maker_that_is_killed_leaves_nothing_that_looks_whole_or_stays(tmp_path):
    folder = tmp_path / "model"
    maker = start_maker(folder, 60)
    until((tmp_path / "log").exists)
    maker.kill()
    maker.wait(timeout=30)
    assert not folder.exists()
    assert start_maker(folder, 0).wait(timeout=30) == 0
    assert (folder / "weights").stat().st_size == 100_000
    assert list(tmp_path.glob(".model.tmp-*")) == []


def test_a_maker_that_fails_leaves_no_trace(tmp_path):
    def make(target):
        raise RuntimeError("no such tensor")

    with pytest.raises(RuntimeError, match="no such tensor"):
        make_once(tmp_path / "model", make)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"^cannot keep a model in .*; set KVPLUG_CACHE"):
        make_once(tmp_path / "file" / "model", lambda target: None)
