"""Two hosts within this one see nothing of each other, and reach each other over their link."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplug_testing import PipeContract, peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts.pair import ADDRESSES, HostPair, NoHostsError
from kvplug_testing.peers import Parent

LIFE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer.of("socket")
    yield made
    made.close()


@pytest.fixture(scope="module")
def hosts(server: ForkServer) -> Iterator[HostPair]:
    try:
        pair = HostPair(server)
    except NoHostsError as e:
        pytest.skip(str(e))
    with pair:
        yield pair


def facts(parent: Parent) -> dict[str, Any]:
    """What tells a process where it is."""
    Path(f"/dev/shm/kvplug-{os.getpid()}").write_text("left")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0kvplug-{os.getpid()}")
        return {
            "boot id": Path("/proc/sys/kernel/random/boot_id").read_text(),
            "processes": [name for name in os.listdir("/proc") if name.isdecimal()],
            "self": os.readlink("/proc/self") == str(os.getpid()),
            "shared memory": os.listdir("/dev/shm"),
            "abstract sockets": Path("/proc/net/unix").read_text().count("@"),
            "name": socket.gethostname(),
        }


def listen(parent: Parent, host: str) -> str:
    with socket.create_server((host, 0)) as listener:
        parent.send(listener.getsockname()[1])
        with listener.accept()[0] as sock:
            while word := sock.recv(100):
                parent.send(word)
    return "ended"


def dial(parent: Parent, host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=3) as sock:
            while word := parent.recv():
                sock.sendall(word)
    except OSError as e:
        return type(e).__name__
    return "ended"


def run(hosts: HostPair, host: int, function: Any, *args: Any) -> peers.Peer:
    return hosts.start(host, f"{__file__}:{function.__name__}", *args, timeout_s=LIFE_S)


def test_a_host_has_its_own_processes_shared_memory_names_and_boot_id(hosts: HostPair) -> None:
    with run(hosts, 0, facts) as one, run(hosts, 1, facts) as other:
        found = [child.result() for child in (one, other)]
    boots = {Path("/proc/sys/kernel/random/boot_id").read_text(), *(each["boot id"] for each in found)}
    assert len(boots) == 3
    for number, each in enumerate(found):
        assert each["self"]
        assert len(each["processes"]) < 5
        assert len(each["shared memory"]) == 1
        assert each["abstract sockets"] == 1
        assert each["name"] == f"kvplug-host{number}"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("kvplug-")]


@pytest.mark.full
def test_the_hosts_reach_each_other_and_not_their_loopback(hosts: HostPair) -> None:
    for here in (0, 1):
        with run(hosts, here, listen, ADDRESSES[here]) as listener:
            port = listener.recv()
            with run(hosts, 1 - here, dial, "127.0.0.1", port) as child:
                assert child.result() == "ConnectionRefusedError"
            with run(hosts, 1 - here, dial, ADDRESSES[here], port) as child:
                child.send(b"hello")
                assert listener.recv() == b"hello"
                child.send(b"")
                assert (child.result(), listener.result()) == ("ended", "ended")


def test_apart_they_hear_nothing_and_then_go_on(hosts: HostPair) -> None:
    with run(hosts, 0, listen, ADDRESSES[0]) as listener:
        port = listener.recv()
        with run(hosts, 1, dial, ADDRESSES[0], port) as child:
            child.send(b"one")
            assert listener.recv() == b"one"
            with hosts.apart():
                child.send(b"two")
                assert not listener.poll(0.5)
            assert listener.recv() == b"two"


def test_a_process_on_a_host_is_stopped_and_killed_as_any_other(hosts: HostPair) -> None:
    with run(hosts, 0, listen, ADDRESSES[0]) as child:
        child.recv()
        assert Path(f"/proc/{child.pid}/comm").exists()
        child.stop()
        child.cont()
        child.kill()
        assert child.exit_code == -9
    with run(hosts, 1, listen, "no address") as child, pytest.raises(peers.ChildError):
        child.recv()


def test_nothing_is_left_of_hosts(server: ForkServer, hosts: HostPair) -> None:
    with peers.nothing_left(), HostPair(server) as pair, run(pair, 1, listen, ADDRESSES[1]) as child:
        assert child.recv()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv here")
def test_a_user_without_rights_has_hosts_or_the_reason_why_not(hosts: HostPair) -> None:
    code = f"""
import sys; sys.path[:] = {sys.path!r}
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts.pair import HostPair, NoHostsError
server = ForkServer.of("socket")
try:
    with HostPair(server) as pair, pair.apart():
        print("hosts")
except NoHostsError as e:
    print(e)
server.close()
"""
    command = ["setpriv", *(("--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ())]
    command += [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "hosts\n" or "not permitted" in done.stdout, done.stdout + done.stderr


# -- what the scorecard says -------------------------------------------------------------------------


class Claimed(PipeContract):
    """The pipe "memory", with other claims."""

    transport = "memory"
    cross_host = True

    @property
    def spec(self) -> Any:
        spec: Any = super().spec
        able = attrs.evolve(spec.capabilities, cross_host=self.cross_host)
        return attrs.evolve(spec, capabilities=able)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, ""),
        ({"cross_host": False}, "memory does not claim cross_host"),
        ({"one_host": "socket is unix"}, "cross_host is not judged: socket is unix"),
        ({"across_processes": False}, "cross_host is not judged: the ends of memory are in one process"),
        ({"forks": False}, "cross_host is not judged: a process with memory must not fork"),
        ({"transport": "", "spec": None}, "cross_host is not judged: Judged does not say whose claim it is"),
    ],
    ids=str,
)
def test_a_claim_that_is_not_judged_is_told_with_the_reason(said: dict[str, Any], reason: str) -> None:
    suite = type("Judged", (Claimed,), said)()
    assert suite.another_host.startswith(reason)
    assert bool(suite.another_host) == bool(reason)


REFUSED = """
from kvplug_testing import PipeContract
from kvplug_testing.hosts import pair

def refuse(*_):
    raise pair.NoHostsError("unshare of namespaces: Operation not permitted")

pair._Host.__init__ = refuse

class TestCpu(PipeContract):
    transport = "cpu"
"""


@pytest.mark.full
def test_a_system_that_permits_no_hosts_is_told_in_the_scorecard(package: Any) -> None:
    pytest.importorskip("kvplug_cpu")
    (package.folder / "tests" / "test_mine.py").write_text(REFUSED)
    found = package.outcomes("-k", "other_host_vanishes", "--kvplug-level", "long")
    (result,) = found.values()
    assert result.outcome == "skipped"
    assert result.reason == (
        "cross_host is not judged: no second host can be made of namespaces here:"
        " unshare of namespaces: Operation not permitted"
    )
