"""Real children: they answer, fail, hang, die, and are missed when they leave something behind."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug import PeerGoneError, TimeoutError
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import until


def echo(parent: peers.Parent, times: int) -> str:
    for _ in range(times):
        parent.send(parent.recv())
    return "done"


def fail(parent: peers.Parent) -> None:
    raise KeyError("the reason")


def sleep_in_here(parent: peers.Parent) -> None:
    parent.send("asleep")
    time.sleep(60)


def leave_at_once(parent: peers.Parent) -> None:
    os._exit(7)


def die_of_a_bus_error(parent: peers.Parent) -> None:
    faulthandler.disable()
    print("the last line", file=sys.stderr, flush=True)
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGBUS)


def say_pid(parent: peers.Parent) -> None:
    parent.send(os.getpid())
    time.sleep(60)


def start_family(parent: peers.Parent) -> None:
    """Report the pids of a child, its child, a fork server, and its child. All of them are stopped."""
    with peers.start(start_child) as child, contextlib.closing(ForkServer("calendar:isleap", 2000)) as server:
        grandchild = child.recv()
        with server.start(f"{__file__}:say_pid") as forked:
            forked.recv()
            pids = [forked.pid, server.pid, grandchild, child.pid]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            parent.send(pids)
            parent.recv(None)


def start_child(parent: peers.Parent) -> None:
    with peers.start(say_pid) as child:
        parent.send(child.recv())
        parent.recv(None)


@pytest.fixture(params=["new", "forked"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., peers.Peer]]:
    """Starts a function of this file in a new process, or in a fork of a fork server."""
    if request.param == "new":
        yield peers.start
        return
    with peers.nothing_left(), contextlib.closing(ForkServer("calendar:isleap", 2000)) as server:
        yield lambda function, *args, **given: server.start(f"{__file__}:{function.__name__}", *args, **given)


def test_a_child_gets_arguments_and_values_and_gives_some_back(start: Any) -> None:
    with peers.nothing_left(), start(echo, 2) as child:
        for value in ({"a": [1, 2.5, None]}, b"bytes"):
            child.send(value)
            assert child.recv() == value
        assert child.result() == "done"
        assert child.wait() == 0


def test_a_child_that_raises_shows_its_traceback_here(start: Any) -> None:
    with start(fail) as child:
        with pytest.raises(peers.ChildError, match="the reason") as caught:
            child.result()
        assert caught.value.kind == "KeyError"


def test_a_wait_that_is_too_long_shows_the_stacks_of_both() -> None:
    with peers.start(sleep_in_here) as child:
        assert child.recv() == "asleep"
        with pytest.raises(TimeoutError) as caught:
            child.result(0.3)
        assert "sleep_in_here" in str(caught.value)
        assert "test_a_wait_that_is_too_long" in str(caught.value)


def test_a_child_that_is_stopped_is_not_waited_for_to_show_its_stacks() -> None:
    with peers.start(echo, 1) as child:
        child.stop()
        assert child.stacks() == ""
        child.cont()
        child.send("x")
        assert child.recv() == "x"
        assert child.result() == "done"
        assert child.stderr == ""


@pytest.mark.full
def test_a_child_whose_time_is_up_dumps_its_stacks_and_exits(start: Any) -> None:
    with start(sleep_in_here, timeout_s=5.0) as child:
        child.recv()
        with pytest.raises(PeerGoneError, match="sleep_in_here"):
            child.result()


def test_a_child_that_ends_without_a_word_is_gone(start: Any) -> None:
    with start(leave_at_once) as child:
        with pytest.raises(PeerGoneError):
            child.recv()
        assert child.wait() == 7


def test_a_child_that_a_signal_killed_is_named_with_it(start: Any) -> None:
    with start(die_of_a_bus_error) as child:
        with pytest.raises(PeerGoneError) as raised:
            child.recv()
        assert child.exit_code == -signal.SIGBUS
    message = str(raised.value)
    assert "killed by SIGBUS> ended" in message
    assert "the last line" in message


def test_a_child_is_killed_stopped_and_continued_by_its_pid(start: Any) -> None:
    with start(echo, 5) as child:
        child.stop()
        child.send("x")
        with pytest.raises(TimeoutError):
            child.recv(0.2)
        child.cont()
        assert child.recv() == "x"
        child.kill()
        assert child.exit_code == -9
        with pytest.raises(PeerGoneError):
            child.recv()


def test_a_family_ends_when_the_process_that_started_it_is_killed_though_it_is_stopped() -> None:
    with peers.start(start_family) as runner:
        pids = runner.recv()
        runner.kill()
    try:
        until(lambda: not any(map(_runs, pids)), 10)
    finally:
        for pid in filter(_runs, pids):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_what_is_left_behind_is_named() -> None:
    kept: list[socket.socket] = []
    named = r"(?s)descriptors: .*socket.*@kvplug-test-name"
    with pytest.raises(AssertionError, match=named), peers.nothing_left(0.1):
        kept.append(socket.socket(socket.AF_UNIX))
        kept[0].bind("\0kvplug-test-name")
    kept.pop().close()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait(), name="of the test")
    with pytest.raises(AssertionError, match=r"threads: \d+ of the test"), peers.nothing_left(0.1):
        thread.start()
    stop.set()
    thread.join()
    with pytest.raises(AssertionError, match="children"), peers.nothing_left(0.1):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.communicate()


SHARED = Path("/dev/shm")
has_names = pytest.mark.skipif(not SHARED.is_dir(), reason="shared memory has no names here")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A name in shared memory, as any library might choose it. It is gone after the test."""
    path = SHARED / f"psm_{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


def leave_a_name(parent: peers.Parent, path: str) -> None:
    Path(path).write_bytes(b"left")


@has_names
def test_shared_memory_of_a_child_that_has_ended_is_left_behind(shared: Path) -> None:
    with (
        pytest.raises(AssertionError, match=f"shared memory: .*{shared.name}"),
        peers.nothing_left(0.1),
        peers.start(leave_a_name, str(shared)) as child,
    ):
        child.result()


@has_names
def test_shared_memory_of_a_process_that_is_no_child_is_its_own(shared: Path) -> None:
    with peers.nothing_left(0.1):
        command = f"sleep 100 3>{shared} >/dev/null 2>&1 & echo $!"
        stranger = int(subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout)
        limit = time.monotonic() + 30
        while not shared.exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
    before = peers.Resources.of()
    os.kill(stranger, signal.SIGKILL)
    assert shared.name in before.shared_memory
