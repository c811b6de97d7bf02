"""The fake libraries of a GPU: their source, and their faults by name."""

from __future__ import annotations

import shutil
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
    with ours.current():
        device.queue_after(before)
        event = device.now()
    assert device.callers_stream() == caller.handle
    assert not event.is_done() and not before.is_done()
    assert not event.stream.wait(event.ticket, 0.05)
    controls.set(gate=0)
    assert event.stream.wait(event.ticket, 60.0)
    device.queue_after(event)
    assert caller.synchronize(60.0)
    ours.close()
    caller.close()
    caller.close()
    for call in (caller.record, caller.put_gate, lambda: caller.copy(0, 0, 0)):
        with pytest.raises(ClosedError, match="this stream of the fake library is closed"):
            call()
    default = controls.default_stream()
    assert default.is_done(default.record())
