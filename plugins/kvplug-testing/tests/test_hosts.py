"""Two hosts within this one see nothing of each other; mutants of the lab use their link."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts import HostPair, NoHostsError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def facts(parent: peers.Parent) -> dict[str, Any]:
    """What shows a process where it is."""
    Path(f"/dev/shm/kvplug-{os.getpid()}").write_text("left")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0kvplug-{os.getpid()}")
        return {
            "self": os.readlink("/proc/self") == str(os.getpid()),
            "shared memory": len(os.listdir("/dev/shm")),
            "abstract sockets": Path("/proc/net/unix").read_text().count("@"),
            "name": socket.gethostname(),
            "boot id": BOOT_ID.read_text(),
        }


def test_a_host_has_its_own_processes_shared_memory_names_and_boot_id() -> None:
    with peers.nothing_left(), contextlib.closing(ForkServer.of("socket")) as server:
        try:
            hosts = HostPair(server)
        except NoHostsError as e:
            pytest.skip(str(e))
        with hosts:
            children = [hosts.start(number, f"{__file__}:facts", timeout_s=60.0) for number in range(2)]
            found = []
            for child in children:
                with child:
                    found.append(child.result())
    assert len({BOOT_ID.read_text(), *(each.pop("boot id") for each in found)}) == 3
    alone = {"self": True, "shared memory": 1, "abstract sockets": 1}
    assert found == [{**alone, "name": f"kvplug-host{number}"} for number in range(2)]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("kvplug-")]
