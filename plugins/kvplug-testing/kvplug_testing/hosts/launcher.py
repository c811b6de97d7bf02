"""The program that becomes one of two hosts, and then runs Python there as its first process.

``python -m kvplug_testing.hosts.launcher 0 0 -c CODE ...`` is the first host; the second one is ``1`` and the
pid of the first one's launcher. The launcher ends as its child does; the child, and all processes of the host
with it, are killed when the launcher dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvplug_testing.hosts import link

ADDRESSES: Final = ("198.18.0.1", "198.18.0.2")
"""Of the two hosts, from the network for benchmarks (RFC 2544)."""

REFUSED: Final = "there can be no host: "
"""How the launcher's message begins where the system does not permit it."""

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x20000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_DIE_WITH_PARENT = 1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where Linux has it

_libc = ctypes.CDLL(None, use_errno=True)


def main(number: int, first: int, arguments: Sequence[str]) -> None:
    """The program. ``first`` is the pid of the first host's launcher, for the second host."""
    try:
        _enter(number, first)
        pid = os.fork()
        if pid == 0:
            _furnish(number)
            os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - what `peers` wrote
    except OSError as e:
        sys.exit(f"{REFUSED}{f'{e.filename}: ' if e.filename else ''}{e.strerror}")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sys.exit(code if code >= 0 else 128 - code)  # as a shell says that a signal has ended it


def _enter(number: int, first: int) -> None:
    """Enter namespaces of its own, and join the network of the first host."""
    uid, gid = os.geteuid(), os.getegid()
    if first and os.readlink("/proc/self/ns/user") != os.readlink(f"/proc/{first}/ns/user"):
        _call("setns", os.open(f"/proc/{first}/ns/user", os.O_RDONLY), _NEW_USER, of="the user namespace")
    namespaces = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NET
    try:
        _call("unshare", namespaces, of="namespaces")
    except PermissionError:
        _call("unshare", namespaces | _NEW_USER, of="namespaces with one of users")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")  # root there: only root keeps its rights in exec
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    link.turn(True, "lo")
    if first:
        here, there = (os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in ("self", first))
        link.join(there)
        for net, address in ((there, ADDRESSES[1 - number]), (here, ADDRESSES[number])):
            _call("setns", net, _NEW_NET, of="a network namespace")
            link.give_address(address)
            link.turn(True)


def _furnish(number: int) -> None:
    """In the first process of the host: processes, shared memory, a name and a boot id of its own."""
    _call("prctl", _DIE_WITH_PARENT, signal.SIGKILL, of="the end with the parent")
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None, of="private mounts")
    _call("mount", b"proc", b"/proc", b"proc", 0, None, of="/proc")
    _call("mount", b"tmpfs", _SHARED_MEMORY.encode(), b"tmpfs", 0, None, of=_SHARED_MEMORY)
    with tempfile.NamedTemporaryFile() as file:
        file.write(f"{uuid.uuid4()}\n".encode())
        file.flush()
        _call("mount", file.name.encode(), _BOOT_ID.encode(), None, _BIND, None, of="a boot id")
    socket.sethostname(f"kvplug-host{number}")


def _call(function: str, *args: Any, of: str) -> None:
    if getattr(_libc, function)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{function} of {of}: {os.strerror(number)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
