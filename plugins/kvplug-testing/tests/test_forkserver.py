"""The children of a fork server are like any others: they answer, fail, die, stop, and leave nothing."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvplug_testing import peers
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.forkserver import ForkServer

HERE = os.path.abspath(__file__)


def echo(parent: peers.Parent, times: int) -> list[Any]:
    for _ in range(times):
        parent.send(parent.recv())
    return [os.getpid(), "calendar" in sys.modules]


def resources(parent: peers.Parent) -> list[str]:
    return sorted(each.partition(" -> ")[2] for each in peers.Resources.of().descriptors)


def wait_here(parent: peers.Parent) -> None:
    parent.send("here")
    time.sleep(60)


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with peers.nothing_left():
        started = ForkServer("calendar:isleap", 2000)
        yield started
        started.close()


def test_many_threads_that_wait_for_one_child_get_its_status(server: ForkServer) -> None:
    for _ in range(5):
        with server.start(f"{HERE}:wait_here") as child, ThreadPoolExecutor(8) as pool:
            assert child.recv() == "here"
            waits = [pool.submit(child.wait) for _ in range(8)]
            child.kill()
            assert {wait.result(30) for wait in waits} == {-signal.SIGKILL}
    with server.start(f"{HERE}:echo", 0) as child:
        assert child.result() == [child.pid, True]


def test_a_child_is_waited_for_beside_more_descriptors_than_select_takes(server: ForkServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not have 2,048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    many = [os.dup(0) for _ in range(1024)]
    try:
        with server.start(f"{HERE}:echo", 0) as child:
            child.result()
            assert child.exit_code == 0
        assert in_forked_child(lambda: "found") == "found"
    finally:
        for each in many:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_holds_its_own_door_and_nothing_of_the_others(server: ForkServer) -> None:
    with server.start(f"{HERE}:echo", 1), server.start(f"{HERE}:resources") as child:
        sockets = [each for each in child.result() if each.startswith("socket:")]
        assert len(sockets) == 1
