"""Real children: they answer, fail, hang, die, and are missed when they leave something behind."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvplug import PeerGoneError, TimeoutError
from kvplug_testing import peers
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import until


def echo(parent: peers.Parent, times: int) -> str:
    for _ in range(times):
        parent.send(parent.recv())
    return "done"


def fail(parent: peers.Parent) -> None:
    raise KeyError("the reason")


def sleep_in_here(parent: peers.Parent) -> None:
    parent.send(os.getpid())
    time.sleep(60)


def die_of_a_bus_error(parent: peers.Parent) -> None:
    faulthandler.disable()
    print("the last line", file=sys.stderr, flush=True)
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGBUS)


def count_sockets(parent: peers.Parent) -> int:
    return sum("socket:" in each for each in peers.Resources.of().descriptors)


def imported_and_set(parent: peers.Parent) -> list[Any]:
    return ["calendar" in sys.modules, "colorsys" in sys.modules, os.environ.get("KVPLUG_NOTHING")]


def start_family(parent: peers.Parent) -> None:
    """Report the pids of a child, its child, a fork server, and its child. All of them are stopped."""
    with peers.start(start_child) as child, contextlib.closing(ForkServer.of("calendar")) as server:
        grandchild = child.recv()
        with server.start(f"{__file__}:sleep_in_here") as forked:
            pids = [forked.recv(), server.pid, grandchild, child.pid]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            parent.send(pids)
            parent.recv(None)


def start_child(parent: peers.Parent) -> None:
    with peers.start(sleep_in_here) as child:
        parent.send(child.recv())
        parent.recv(None)


@pytest.fixture(params=["new", "forked"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., peers.Peer]]:
    """Starts a function of this file in a new process, or in a fork of a fork server."""
    if request.param == "new":
        yield peers.start
        return
    with peers.nothing_left(), contextlib.closing(ForkServer.of("calendar")) as server:
        yield lambda function, *args, **given: server.start(f"{__file__}:{function.__name__}", *args, **given)


def test_a_child_gets_arguments_and_values_and_gives_some_back(start: Any) -> None:
    with peers.nothing_left(), start(echo, 2) as child:
        for value in ({"a": [1, 2.5, None]}, b"bytes" * 100_000):
            child.send(value)
            assert child.recv() == value
        assert child.result() == "done"
        assert child.wait() == 0


def test_a_server_that_is_forked_has_what_the_other_imported_and_the_environment_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with peers.nothing_left(), contextlib.closing(ForkServer.of("calendar")) as first:
        monkeypatch.setenv("KVPLUG_NOTHING", "now")
        with (
            contextlib.closing(ForkServer.of("colorsys", forked_from=first)) as server,
            server.start(f"{__file__}:imported_and_set") as child,
        ):
            assert child.result() == [True, True, "now"]
        with first.start(f"{__file__}:imported_and_set") as child:
            assert child.result() == [True, False, None]


def test_a_child_that_raises_shows_its_traceback_here(start: Any) -> None:
    with start(fail) as child:
        with pytest.raises(peers.ChildError, match="the reason") as caught:
            child.result()
        assert caught.value.kind == "KeyError"


def test_a_wait_that_is_too_long_shows_the_stacks_of_both(start: Any) -> None:
    with start(sleep_in_here) as child:
        assert child.recv() == child.pid
        with pytest.raises(TimeoutError) as caught:
            child.result(0.3)
        assert "sleep_in_here" in str(caught.value)
        assert "test_a_wait_that_is_too_long" in str(caught.value)


@pytest.mark.full
def test_a_child_whose_time_is_up_dumps_its_stacks_and_exits(start: Any) -> None:
    with start(sleep_in_here, timeout_s=3.0) as child:
        child.recv()
        with pytest.raises(PeerGoneError, match="sleep_in_here"):
            child.result()


def test_a_child_that_a_signal_killed_is_named_with_it(start: Any) -> None:
    with start(die_of_a_bus_error) as child:
        with pytest.raises(PeerGoneError, match=r"(?s)killed by SIGBUS> ended.*the last line"):
            child.recv()
        assert child.exit_code == -signal.SIGBUS


def test_a_child_is_killed_stopped_and_continued_by_its_pid(start: Any) -> None:
    with start(echo, 5) as child:
        child.stop()
        child.send("x")
        with pytest.raises(TimeoutError):
            child.recv(0.2)
        child.cont()
        assert child.recv() == "x"
        with ThreadPoolExecutor(8) as pool:
            waits = [pool.submit(child.wait) for _ in range(8)]
            child.kill()
            assert {wait.result(30) for wait in waits} == {-signal.SIGKILL}
        with pytest.raises(PeerGoneError):
            child.recv()


def test_a_child_is_waited_for_beside_more_descriptors_than_select_takes(start: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not have 2,048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    many = [os.dup(0) for _ in range(1024)]
    try:
        with start(echo, 0) as child:
            assert (child.result(), child.exit_code) == ("done", 0)
        assert in_forked_child(lambda: "found") == "found"
    finally:
        for each in many:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_holds_its_own_door_and_nothing_of_the_others(start: Any) -> None:
    with start(echo, 1), start(count_sockets) as child:
        assert child.result() == 1


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
    with pytest.raises(AssertionError, match=r"descriptors: \d+ -> socket:"), peers.nothing_left(0.1):
        kept.append(socket.socket(socket.AF_UNIX))
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


def leave_a_name(parent: peers.Parent, path: str) -> None:
    Path(path).write_bytes(b"left")


def test_shared_memory_of_a_child_is_left_behind_and_that_of_others_is_their_own() -> None:
    path = Path(f"/dev/shm/psm_{os.getpid()}")  # a name as any library might choose it
    left = pytest.raises(AssertionError, match=f"shared memory: .*{path.name}")
    with left, peers.nothing_left(0.1), peers.start(leave_a_name, str(path)) as child:
        child.result()
    path.unlink()
    with peers.nothing_left(0.1):
        command = f"sleep 100 3>{path} >/dev/null 2>&1 & echo $!"
        stranger = int(subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout)
        until(path.exists)
    before = peers.Resources.of()
    os.kill(stranger, signal.SIGKILL)
    path.unlink()
    assert path.name in before.shared_memory
