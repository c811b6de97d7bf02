"""The fake libraries of a GPU: their source, and their faults by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvplug import ClosedError
from kvplug_lab.gpu.fake import CUDART, NCCL, OLD_NCCL, Controls, FakeLibrary
from kvplug_lab.gpu.host import HostDevice

compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
every_library = pytest.mark.parametrize("library", [NCCL, OLD_NCCL, CUDART], ids=lambda each: each.file)


@pytest.mark.full
@compiled
@every_library
def test_the_source_gives_no_warning(library: FakeLibrary, tmp_path: Path) -> None:
    assert library.build(tmp_path, "-Wall", "-Wextra", "-Wshadow", "-Werror") == str(tmp_path / library.file)


@every_library
def test_without_a_compiler_it_cannot_be_built(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(OSError, match="no-such-compiler"):
        library.build(tmp_path)


@pytest.mark.full
@compiled
@every_library
def test_a_fault_that_there_is_not_is_refused(library: FakeLibrary, tmp_path: Path) -> None:
    path = library.build(tmp_path)
    controls = Controls(path)
    with pytest.raises(LookupError, match="the fake has no fial_after"):
        controls.set(fial_after=1)
    with pytest.raises(LookupError, match="the fake has no nothing"):
        controls.get("nothing")
    loading = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", path]
    misspelt = {**os.environ, **library.environment(hold=1, fial_after=1)}
    assert misspelt[library.variable] == "hold=1,fial_after=1"
    done = subprocess.run(loading, env=misspelt, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGABRT
    assert f"{library.variable}: what is fial_after=1?" in done.stderr


@pytest.mark.full
@compiled
@pytest.mark.parametrize(("library", "counter"), [(NCCL, "operations"), (CUDART, "copies")])
def test_a_reset_takes_back_what_was_set_and_leaves_what_was_counted(
    library: FakeLibrary, counter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.variable, "version=1")
    controls = Controls(library.build(tmp_path))
    controls.set(version=2, hold=1, fail_after=3, **{counter: 4})
    controls.reset()
    found = {name: controls.get(name) for name in ("version", "hold", "fail_after", counter)}
    assert found == {"version": 1, "hold": 0, "fail_after": -1, counter: 4}


@pytest.mark.full
@compiled
@every_library
def test_streams_keep_their_order_and_wait_for_each_other(library: FakeLibrary, tmp_path: Path) -> None:
    path = library.build(tmp_path)
    controls = Controls(path)
    caller = controls.stream()
    device = HostDevice(path, caller)
    assert device.callers_stream() == caller.handle
    ours = device.new_stream()
    controls.set(gate=1)
    caller.put_gate()
    before = device.now()
    ours.wait(before)
    event = ours.record()
    assert not event.is_done() and not before.is_done()
    assert not event.stream.wait(event.ticket, 0.05)
    controls.set(gate=0)
    assert event.stream.wait(event.ticket, 60.0)
    device.follow(event)
    assert caller.synchronize(60.0)
    ours.close()
    caller.close()
    caller.close()
    for call in (caller.record, caller.put_gate, lambda: caller.copy(0, 0, 0)):
        with pytest.raises(ClosedError, match="this stream of the fake library is closed"):
            call()
    default = controls.default_stream()
    assert default.is_done(default.record())
