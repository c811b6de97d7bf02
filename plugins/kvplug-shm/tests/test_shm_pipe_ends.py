"""How a pipe ends, and what keeps it from beginning: deaths, races, limits, other users, other namespaces."""

from __future__ import annotations

import contextlib
import logging.handlers
import os
import queue
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shm_pipe_ends as ends
from kvplug import (
    ClosedError,
    ConfigError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.transport import PeerIdentity, WireError
from kvplug_shm.memory import waiting
from kvplug_shm.pipe.contact import ShmContact
from kvplug_testing import peers
from kvplug_testing.comparison import assert_same
from kvplug_testing.waits import Call, until

local_pair, remote_pair = ends.local_pair, ends.remote_pair

MIB = 1024 * 1024


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "num_sent"), [(3 * MIB, -1), (3 * MIB, 0), (3 * MIB, MIB), (40 * MIB, 1_900_000)]
)
def test_part_of_a_message_is_never_received_and_the_whole_one_before_it_is(
    remote_pair: Any, nbytes: int, num_sent: int
) -> None:
    pipe, child = remote_pair("send_part", nbytes, num_sent)
    child.recv()
    child.kill()
    assert_same(torch.arange(10), pipe.recv_tensor(timeout=ends.PATIENCE_S))
    for _ in range(2):
        with pytest.raises(PeerGoneError, match=f"pid {child.pid}"):
            pipe.recv_tensor(timeout=ends.PATIENCE_S)
    with pytest.raises(PeerGoneError):
        pipe.send_tensor(None, timeout=ends.PATIENCE_S)


def test_a_part_that_came_before_the_death_is_not_the_message(remote_pair: Any) -> None:
    pipe, child = remote_pair("send_part", 3 * MIB, MIB)
    child.recv()
    assert pipe.recv_tensor().numel() == 10
    out = torch.zeros(3 * MIB, dtype=torch.uint8)
    with pytest.raises(TimeoutError):
        pipe.recv_tensor(out, timeout=0.1)
    receiving = Call(lambda: pipe.recv_tensor(timeout=None))
    time.sleep(0.1)
    child.kill()
    assert isinstance(receiving.outcome(), PeerGoneError)


def test_without_a_pidfd_silence_counts_as_death_and_both_ends_hear_of_it(
    remote_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    pipe, child = remote_pair("echo", heartbeat_timeout_s=1.5)
    for _ in range(8):  # longer than the timeout: heartbeats keep it alive
        pipe.send_tensor(torch.arange(5))
        assert pipe.recv_tensor().numel() == 5
        time.sleep(0.3)
    child.stop()
    try:
        with pytest.raises(PeerGoneError, match="silent"):
            pipe.recv_tensor(timeout=ends.PATIENCE_S)
    finally:
        child.cont()
    assert child.result() == 8  # its receive has ended: its peer hung up, though this end is not closed
    assert not pipe.closed


# -- races -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("spin_us", [0, 50])
def test_ending_wakes_whoever_sleeps_whatever_the_longest_sleep(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch, end: str, spin_us: int
) -> None:
    """The word that is slept on changes: no wake is lost for which the cap of a sleep has to make up."""
    monkeypatch.setattr(waiting, "NAP_S", 3600.0)
    for number in range(60):
        one, other = local_pair(max_in_flight_bytes=1000, spin_us=spin_us)
        one.send_tensor(torch.zeros(900, dtype=torch.uint8))
        calls = [
            Call(lambda p=one: p.recv_tensor(timeout=None)),  # type: ignore[misc]
            Call(lambda p=one: p.send_tensor(torch.zeros(900), timeout=None)),  # type: ignore[misc]
        ]
        if number % 3:
            time.sleep(0.0005 * (number % 7))  # on their way to sleep, or asleep
        getattr(one, end)()
        for call in calls:
            assert isinstance(call.outcome(20), ClosedError)
        with pytest.raises(PeerGoneError):
            while True:
                other.recv_tensor(timeout=20)


def test_the_watcher_wakes_whoever_sleeps_whatever_the_longest_sleep(
    remote_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "NAP_S", 3600.0)
    pipe, child = remote_pair("wait", max_in_flight_bytes=20 * MIB)
    child.recv()
    transfer = pipe.send_tensor(torch.zeros(19 * MIB, dtype=torch.uint8))
    receiving = Call(lambda: pipe.recv_tensor(timeout=None))
    sending = Call(lambda: pipe.send_tensor(torch.zeros(9 * MIB, dtype=torch.uint8), timeout=None))
    time.sleep(0.2)
    child.kill()
    assert isinstance(receiving.outcome(20), PeerGoneError)
    assert isinstance(sending.outcome(20), PeerGoneError)
    with pytest.raises(PeerGoneError):
        transfer.wait(20)


def test_a_writer_that_sleeps_is_woken_when_its_message_is_aborted(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "NAP_S", 3600.0)
    one, _ = local_pair()
    transfer = one.send_tensor(torch.zeros(20 * MIB, dtype=torch.uint8))
    time.sleep(0.1)
    one.abort()
    with pytest.raises(ClosedError):
        transfer.wait(20)
    until(lambda: not [each for each in threading.enumerate() if each.name == "kvplug-shm-send"])


def test_what_has_failed_is_not_sent_any_further(local_pair: Any) -> None:
    """Its memory is the caller's again: it would arrive whole, with what was written over it."""
    one, other = local_pair()
    source = torch.ones(20 * MIB, dtype=torch.uint8)
    transfer = one.send_tensor(source)
    one.abort()
    with pytest.raises(ClosedError):
        transfer.wait(5)
    source.fill_(2)
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=5)


def test_a_send_that_gets_no_thread_ends_and_so_does_every_other(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    one, other = local_pair()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises((RuntimeError, TransportError)):
            one.send_tensor(torch.ones(20 * MIB))
    with pytest.raises(TransportError):
        one.send_tensor(torch.ones(20 * MIB), timeout=2)
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=5)
    one.close(1)


# -- an idle end -----------------------------------------------------------------------------------


@pytest.mark.timing
def test_waiting_costs_no_processor_time(local_pair: Any) -> None:
    one, _ = local_pair(max_in_flight_bytes=1000)
    one.send_tensor(torch.zeros(900, dtype=torch.uint8))
    calls = [
        Call(lambda: one.recv_tensor(timeout=2.0)),
        Call(lambda: one.send_tensor(torch.zeros(900), timeout=2.0)),
    ]
    time.sleep(0.3)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.2)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
    for call in calls:
        assert isinstance(call.outcome(), TimeoutError)


# -- beginnings ------------------------------------------------------------------------------------


def test_what_is_not_a_contact_is_refused_without_repeating_it() -> None:
    for text in (
        "",
        "shm1",
        "shm1 x",
        "shm2 x unix:@y",
        "shm1  unix:@abcdef",
        "shm1 x abcdef",
        "shm1 a b c",
        "cpu1 x unix:@abcdef",
    ):
        with pytest.raises(WireError) as caught:
            ends.endpoint().connect(text)
        assert "abcdef" not in str(caught.value)


def test_another_host_or_network_namespace_is_refused_with_advice() -> None:
    with pytest.raises(TransportError, match="another host or network namespace"):
        ends.endpoint().connect(str(ShmContact("another-host/net", ("unix:@kvplug-x",))))


@pytest.mark.parametrize("dead_at", ["connecting", "accepting"])
def test_a_peer_that_is_dead_before_it_is_watched_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, dead_at: str
) -> None:
    open_pidfd = PeerIdentity.open_pidfd

    def gone(self: Any) -> Any:
        if (threading.current_thread() is threading.main_thread()) == (dead_at == "connecting"):
            raise PeerGoneError("it has ended")
        return open_pidfd(self)

    end = ends.endpoint()
    with peers.nothing_left(), end.listen() as listener:
        with monkeypatch.context() as patch:
            patch.setattr(PeerIdentity, "open_pidfd", gone)
            for _ in range(3):
                with pytest.raises(PeerGoneError):
                    end.connect(listener.contact, timeout=10)
        with end.connect(listener.contact) as one, listener.accept() as other:
            one.send_tensor(None)
            assert other.recv_tensor() is None


def test_rings_that_are_too_large_and_devices_that_are_not_the_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="slots"):
        ends.endpoint(slots=1024, slot_bytes=MIB)
    with pytest.raises(ConfigError, match="cuda"):
        ends.endpoint(device="cuda:0")


def test_the_accepting_end_says_how_large_the_rings_are() -> None:
    listening, connecting = ends.endpoint(slots=3, slot_bytes=2000), ends.endpoint(slots=5)
    with (
        listening.listen() as listener,
        connecting.connect(listener.contact) as one,
        listener.accept() as other,
    ):
        for pipe in (one, other):
            assert pipe.held.shared == 2 * 3 * 2048


def drop_unclaimed(listener: Any) -> None:
    """A pipe whose other end failed at its last step is there to be accepted, though its peer is gone."""
    while True:
        try:
            listener.accept(0.3).abort()
        except ResourceExhaustedError:  # said once
            pass
        except TimeoutError:
            return


def without_descriptors(parent: peers.Parent) -> list[str]:
    """Connect with fewer and fewer descriptors left; what was said, and how many are held afterwards."""
    end = ends.endpoint()
    said = []
    with end.listen() as listener:
        with end.connect(listener.contact) as one, listener.accept() as other:
            one.send_tensor(torch.arange(3))  # all that is imported late is there now
            other.recv_tensor().tolist()
        here, before_that = os.listdir("/proc/self/fd"), None
        while here != before_that:  # those two give back what they had in threads of their own
            time.sleep(0.5)
            here, before_that = os.listdir("/proc/self/fd"), here
        used, before = max(int(fd) for fd in here), len(here)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        taken: list[int] = []
        for more in range(1, 13):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
            with contextlib.suppress(OSError):  # a lower number that was given back late would be one more
                while True:
                    taken.append(os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + more, hard))
            try:
                with end.connect(listener.contact, timeout=3) as one, listener.accept(3) as other:
                    one.send_tensor(torch.arange(3))
                    said.append(str(other.recv_tensor().tolist()))
            except Exception as e:
                said.append(type(e).__name__)
                drop_unclaimed(listener)
        for fd in taken:
            os.close(fd)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    return said


@pytest.mark.full
def test_too_few_descriptors_are_an_error_and_leave_nothing() -> None:
    with peers.start(without_descriptors, timeout_s=120) as child:
        said = child.result(120)
    assert said[-1] == "[0, 1, 2]", said
    assert set(said) <= {"[0, 1, 2]", "ResourceExhaustedError", "PeerGoneError", "TimeoutError"}, said
    assert said[0] != "[0, 1, 2]"


def without_addresses(parent: peers.Parent) -> str:
    logged: queue.Queue[logging.LogRecord] = queue.Queue()
    logging.getLogger().addHandler(logging.handlers.QueueHandler(logged))
    end = ends.endpoint(slots=512)
    with end.listen() as listener:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * MIB, resource.RLIM_INFINITY))
        try:
            end.connect(listener.contact, timeout=10)
        except ResourceExhaustedError as e:
            return f"{e}; {logged.get(timeout=10).getMessage()}"
    return "connected"


@pytest.mark.full
def test_too_little_memory_for_the_rings_is_an_error_at_both_ends() -> None:
    with peers.start(without_addresses) as child:
        said = child.result()
    assert "its log says why" in said
    assert "shared memory of" in said


AS_NOBODY = """
import os, sys
{path}
import kvplug_shm.pipe.endpoint
from kvplug import KvplugError
from kvplug.transport import Credentials, PipeContext, dial, local_domain
local_domain()  # nothing more is read as another user, which may not be able to read our files
os.setgid(65534); os.setuid(65534)
end = kvplug_shm.pipe.endpoint.ShmEndpoint(PipeContext(options=None, credentials=Credentials()))
try:
    end.connect(sys.argv[1], timeout=10)
    print("in")
except KvplugError as e:
    print(type(e).__name__, e)
"""


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_is_refused() -> None:
    end = ends.endpoint()
    with peers.nothing_left(), end.listen() as listener:
        path = "\n".join(f"sys.path.append({each!r})" for each in sys.path if each)
        code = AS_NOBODY.format(path=path)
        done = subprocess.run(
            [sys.executable, "-c", code, listener.contact],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.startswith("AuthenticationError"), done.stderr
        with pytest.raises(TimeoutError):
            listener.accept(0.05)


ELSEWHERE = """
import os, sys
{path}
import torch
from kvplug import PeerGoneError
from kvplug.transport import Credentials, PipeContext
from kvplug_shm.pipe.endpoint import ShmEndpoint
end = ShmEndpoint(PipeContext(options=None, credentials=Credentials(), heartbeat_timeout_s=2.0))
pipe = end.connect(sys.argv[1], timeout=20)
while True:
    try:
        pipe.send_tensor(pipe.recv_tensor())
    except PeerGoneError:
        break
"""


def unshared(*flags: str) -> list[str]:
    """The command, or a skip with the reason."""
    command = ["unshare", *flags]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    return command


@pytest.mark.full
@pytest.mark.parametrize("flags", [("--ipc",), ("--pid", "--fork", "--kill-child", "--ipc")])
def test_processes_in_other_namespaces_of_one_host_share_memory(flags: tuple[str, ...]) -> None:
    """In other pid namespaces too, where the ends have no pidfds and use heartbeats."""
    command = unshared(*flags)
    path = "\n".join(f"sys.path.append({each!r})" for each in sys.path if each)
    with ends.endpoint(heartbeat_timeout_s=2.0).listen() as listener:
        code = textwrap.dedent(ELSEWHERE.format(path=path))
        child = subprocess.Popen([*command, sys.executable, "-c", code, listener.contact])
        try:
            with listener.accept(ends.PATIENCE_S) as pipe:
                for _ in range(5):
                    sent = torch.randint(0, 255, (3 * MIB,), dtype=torch.uint8)
                    pipe.send_tensor(sent)
                    assert_same(sent, pipe.recv_tensor())
                    time.sleep(0.6)
                child.kill()
                with pytest.raises(PeerGoneError):
                    pipe.recv_tensor(timeout=ends.PATIENCE_S)
        finally:
            child.kill()
            child.wait()


def test_a_host_without_dev_shm_room_does_not_matter(local_pair: Any) -> None:
    """Nothing of a pipe is in /dev/shm, whose size a container limits to 64 MB."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    one, other = local_pair()
    one.send_tensor(torch.zeros(MIB))
    other.recv_tensor()
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) - before == set()


@pytest.mark.full
def test_a_tensor_that_is_given_other_memory_is_sent_from_what_it_had(local_pair: Any) -> None:
    one, other = local_pair(slots=1, slot_bytes=4096)
    tensor = torch.full((2**22,), 7, dtype=torch.uint8)
    sent = one.send_tensor(tensor)
    tensor.data = torch.zeros(1, dtype=torch.uint8)
    others = [torch.zeros(2**22, dtype=torch.uint8) for _ in range(3)]
    assert other.recv_tensor().eq(7).all()
    sent.wait(30)
    assert not any(each.any() for each in others)
