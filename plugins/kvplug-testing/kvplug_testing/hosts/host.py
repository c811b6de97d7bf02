"""Makes a forked process one of two hosts: it forks the host's first process, which forks all others."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import socket
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

from kvplug_testing import forkserver
from kvplug_testing.hosts import link
from kvplug_testing.peers import Parent, die_with_parent

ADDRESSES: Final = ("198.18.0.1", "198.18.0.2")
"""Of the two hosts, from the network for benchmarks (RFC 2544)."""

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x20000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x1000, 0x4000, 0x40000
_BOOT_ID = b"/proc/sys/kernel/random/boot_id"
_SHARED_MEMORY = b"/dev/shm"


def become(parent: Parent, control_name: bytes, number: int, first: int) -> None:
    """In a process of a fork server: be a host, whose first process serves the client at the socket
    ``control_name``.

    ``first`` is the pid of the first host, for the second one. Reports why there can be no host; ``""`` if
    there is. All processes of the host are killed when this one dies.
    """
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(control_name)
    faulthandler.cancel_dump_traceback_later()  # its thread could not enter the namespaces
    with _refusals_told(parent):
        _enter(number, first)
        die_with_parent()  # new credentials may have ended that
        if os.fork() == 0:  # only a child is in the namespace of processes
            _be_the_first_process(parent, control, number)
        control.close()
        os.wait()


def _be_the_first_process(parent: Parent, control: socket.socket, number: int) -> None:
    try:
        die_with_parent()
        with _refusals_told(parent):
            _furnish(number)
            parent.send("")
        forkserver.serve(parent, control)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _refusals_told(parent: Parent) -> Any:
    try:
        yield
    except OSError as e:
        parent.send(f"{f'{e.filename}: ' if e.filename else ''}{e.strerror}")
        raise


def _enter(number: int, first: int) -> None:
    """Enter namespaces of its own, and join the network of the first host."""
    uid, gid = os.geteuid(), os.getegid()
    if first and os.readlink("/proc/self/ns/user") != os.readlink(f"/proc/{first}/ns/user"):
        _call("setns", os.open(f"/proc/{first}/ns/user", os.O_RDONLY), _NEW_USER)
    namespaces = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NET
    try:
        _call("unshare", namespaces)
    except PermissionError:
        _call("unshare", namespaces | _NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    link.turn(True, "lo")
    if first:
        here, there = (os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in ("self", first))
        link.join(there)
        for net, address in ((there, ADDRESSES[1 - number]), (here, ADDRESSES[number])):
            _call("setns", net, _NEW_NET)
            link.give_address(address)
            link.turn(True)
        for net in (there, here):
            _call("setns", net, _NEW_NET)
            link.wait_until_running()
            os.close(net)


def _furnish(number: int) -> None:
    """In the host's first process: processes, shared memory, interfaces, a name and a boot id of its own."""
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    _call("mount", b"tmpfs", _SHARED_MEMORY, b"tmpfs", 0, None)
    with contextlib.suppress(OSError):  # some containers forbid it: few libraries look for interfaces there
        _call("mount", b"sysfs", b"/sys", b"sysfs", _READ_ONLY, None)
    with tempfile.NamedTemporaryFile() as file:
        file.write(f"{uuid.uuid4()}\n".encode())
        file.flush()
        _call("mount", file.name.encode(), _BOOT_ID, None, _BIND, None)
    socket.sethostname(f"kvplug-host{number}")


def _call(function: str, *args: Any) -> None:
    """Call a function of the C library.

    Raises:
        OSError: it fails; the error names the call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}{args}: {os.strerror(number)}")
