"""The watcher, with real processes that are killed and stopped by pid."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplug.errors import PeerGoneError
from kvplug.net import liveness
from kvplug.net.liveness import Watch
from kvplug.net.trust.identity import PeerIdentity
from kvplug_testing import peers
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.waits import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]
needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd on this platform")


def watcher_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "kvplug liveness"]


class Gone:
    """Records the reasons that the watcher gives."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.event = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.event.set()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(10)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def gone() -> Gone:
    return Gone()


class Polls:
    """What the watcher polls; ``polled`` is called with the descriptors that have an event."""

    def __init__(self) -> None:
        self.polled: Callable[[list[int]], None] = lambda ready: None


class Poller:
    def __init__(self, polls: Polls, inner: Any) -> None:
        self.polls, self.inner = polls, inner
        self.register = inner.register

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = self.inner.poll(timeout)
        if timeout != 0:  # else under the lock, with which no other thread comes in
            self.polls.polled([fd for fd, _ in events])
        return events


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    made, make = Polls(), select.poll
    monkeypatch.setattr(select, "poll", lambda: Poller(made, make()))
    return made


@needs_pidfd
def test_a_stopped_process_is_alive_and_a_killed_one_is_noticed_at_once_even_before_it_is_reaped(
    sleeper: subprocess.Popen[bytes], gone: Gone
) -> None:
    pidfd = os.pidfd_open(sleeper.pid)
    w = Watch(pidfd=os.dup(pidfd), on_gone=gone)
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert not gone.event.wait(0.5)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert gone.event.wait(5)
    assert w.reason == "its process ended"
    w.close()
    assert gone.reasons == ["its process ended"]
    late = Gone()
    Watch(pidfd=pidfd, on_gone=late)
    assert late.event.wait(5), "it had ended before it was watched"


def test_silence_beyond_the_timeout_is_death(pair: tuple[socket.socket, socket.socket], gone: Gone) -> None:
    began = time.monotonic()
    Watch(sock=pair[0], interval_s=0.05, timeout_s=0.4, on_gone=gone)
    assert gone.event.wait(5)
    assert 0.35 < time.monotonic() - began < 4
    assert gone.reasons[0].startswith("silent for 0.")


def test_two_ends_that_beat_keep_each_other_alive(
    pair: tuple[socket.socket, socket.socket], gone: Gone
) -> None:
    watches = [Watch(sock=s, interval_s=0.05, timeout_s=0.3, on_gone=gone) for s in pair]
    assert not gone.event.wait(1.0)
    for w in watches:
        w.close()


def watches(parent: peers.Parent, fd: int) -> list[str]:
    reasons: list[str] = []
    Watch(sock=socket.socket(fileno=fd), interval_s=0.05, timeout_s=0.6, on_gone=reasons.append)
    parent.send("ready")
    parent.recv()
    return reasons


def test_our_own_stop_is_not_taken_for_the_peers_silence(pair: tuple[socket.socket, socket.socket]) -> None:
    """A process that was stopped for longer than the timeout finds the beats waiting for it."""
    ours, theirs = pair
    w = Watch(sock=ours, interval_s=0.05, timeout_s=30, on_gone=print)
    with peers.start(watches, theirs.fileno(), pass_fds=[theirs.fileno()]) as child:
        assert child.recv() == "ready"
        child.stop()
        time.sleep(1.2)
        child.cont()
        time.sleep(0.3)
        child.send("enough")
        assert child.result() == []
    w.close()


def test_a_closed_watch_never_calls_back(pair: tuple[socket.socket, socket.socket], gone: Gone) -> None:
    w = Watch(sock=pair[0], on_gone=gone)
    w.close()
    w.close()
    pair[1].close()
    assert not gone.event.wait(0.2)
    assert w.reason is None


def test_a_callback_may_watch_and_close_and_may_fail(
    pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    second = Gone()
    a, b = socket.socketpair()

    def first(reason: str) -> None:
        Watch(sock=a, on_gone=second)
        b.close()
        raise RuntimeError("a callback that fails")

    Watch(sock=pair[0], on_gone=first)
    pair[1].close()
    assert second.event.wait(5)
    a.close()
    until(lambda: "a callback of the liveness watcher failed" in caplog.text)


def test_one_thread_serves_many_watches_and_ends_with_the_last(gone: Gone) -> None:
    pairs = [socket.socketpair() for _ in range(50)]
    watches = [Watch(sock=a, on_gone=gone) for a, _ in pairs]
    assert len(watcher_threads()) == 1
    for _, b in pairs[:25]:
        b.close()
    until(lambda: len(gone.reasons) == 25)
    for w in watches:
        w.close()
    until(lambda: not watcher_threads())
    for pair in pairs:
        for s in pair:
            s.close()


@needs_pidfd
def test_the_death_of_a_process_is_not_taken_for_that_of_another_with_its_pid(
    sleeper: subprocess.Popen[bytes], polls: Polls
) -> None:
    dies = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert dies.stdin is not None
    gone, alive = Gone(), Gone()
    keeps_the_loop = Watch(pidfd=os.pidfd_open(sleeper.pid), on_gone=Gone())
    number = os.pidfd_open(dies.pid)
    old = Watch(pidfd=number, on_gone=gone)
    new: list[liveness.Watch] = []
    numbers: list[int] = []

    def others_come_in(ready: list[int]) -> None:
        """Before the watcher can act on the death, the number is another watch's."""
        if number in ready and not new:
            old.close()
            pidfd = os.pidfd_open(sleeper.pid)
            again = fcntl.fcntl(pidfd, fcntl.F_DUPFD_CLOEXEC, number)  # lower numbers may be free
            os.close(pidfd)
            numbers.append(again)
            new.append(Watch(pidfd=again, on_gone=alive))

    polls.polled = others_come_in
    try:
        dies.stdin.close()
        dies.wait(10)
        until(lambda: new)
        assert numbers == [number], "the test is about a number that is used again"
        assert not alive.event.wait(0.3)
    finally:
        for each in (old, keeps_the_loop, *new):
            each.close()


def test_a_forked_child_starts_its_own_watcher_and_leaves_the_parents_alone(
    pair: tuple[socket.socket, socket.socket], gone: Gone
) -> None:
    w = Watch(sock=pair[0], on_gone=gone)

    def look() -> str:
        w.close()
        a, b = socket.socketpair()
        childs = Gone()
        Watch(sock=a, on_gone=childs)
        b.close()
        return f"{childs.event.wait(5)} {gone.reasons}"

    assert in_forked_child(look) == "True []"
    assert not gone.event.is_set()
    pair[1].close()
    assert gone.event.wait(5), "the child changed what the parent watches"


def test_an_identity_opens_the_right_process_and_no_other(sleeper: subprocess.Popen[bytes]) -> None:
    with open(f"/proc/{sleeper.pid}/stat", encoding="ascii") as f:
        start_time = int(f.read().rpartition(")")[2].split()[19])
    here = PeerIdentity.of_this_process()
    fields = {"boot_id": here.boot_id, "pid_ns": here.pid_ns, "pid": sleeper.pid}
    pidfd = PeerIdentity(start_time=start_time, **fields).open_pidfd()
    assert pidfd is not None
    os.close(pidfd)
    with pytest.raises(PeerGoneError, match="belongs to another process"):
        PeerIdentity(start_time=start_time - 1, **fields).open_pidfd()
    sleeper.kill()
    sleeper.wait(10)
    with pytest.raises(PeerGoneError, match="has ended"):
        PeerIdentity(start_time=start_time, **fields).open_pidfd()


def test_a_process_of_another_host_or_namespace_has_no_pidfd() -> None:
    here = PeerIdentity.of_this_process()
    for elsewhere in (
        PeerIdentity(boot_id="other", pid_ns=here.pid_ns, pid=here.pid, start_time=here.start_time),
        PeerIdentity(boot_id=here.boot_id, pid_ns="pid:[1]", pid=here.pid, start_time=here.start_time),
        PeerIdentity(boot_id="", pid_ns="", pid=here.pid, start_time=here.start_time),
    ):
        assert elsewhere.open_pidfd() is None
