"""Two hosts within this one see nothing of each other, and reach each other over their link."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts.pair import ADDRESSES, HostPair, NoHostsError
from kvplug_testing.peers import Parent


@pytest.fixture
def hosts() -> Iterator[HostPair]:
    with peers.nothing_left(), contextlib.closing(ForkServer.of("socket")) as server:
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


def listen(parent: Parent, host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        parent.send(listener.getsockname()[1])
        with listener.accept()[0] as sock:
            while word := sock.recv(100):
                parent.send(word)


def dial(parent: Parent, host: str, port: int) -> None:
    with socket.create_connection((host, port), timeout=3) as sock:
        while word := parent.recv():
            sock.sendall(word)


def run(hosts: HostPair, host: int, function: Any, *args: Any) -> peers.Peer:
    return hosts.start(host, f"{__file__}:{function.__name__}", *args, timeout_s=60.0)


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
