"""Two hosts within this one: :class:`HostPair` starts processes on either.

A host is a set of Linux namespaces. Its processes see no process, shared memory, abstract socket or loopback
address of the other, and another boot id; a network link joins the two. Only the clock, the kernel and the
files are shared. It needs root, or a system that lets users make user namespaces, and the program ``ip``
(iproute2).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from kvplug import KvplugError
from kvplug_testing import forkserver, peers, waits
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.limits import libc_call
from kvplug_testing.peers import Parent

ADDRESSES: Final = ("198.18.0.1", "198.18.0.2")
"""Of the two hosts, from the network for benchmarks (RFC 2544)."""

_LINK = "kvplug0"
"""Name of the link at either end."""
_RUNNING_S = 3.0
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x20000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _BIND, _RECURSIVE, _PRIVATE = 0x1, 0x1000, 0x4000, 0x40000
_BOOT_ID = b"/proc/sys/kernel/random/boot_id"
_SHARED_MEMORY = b"/dev/shm"


class NoHostsError(KvplugError):
    """This system does not allow the namespaces of a host; the message names what it refuses."""


class HostPair(ExitStack):
    """Two hosts, joined by a link. Their processes are forked, and have imported what a fork server has. Both
    hosts end with the block, or with :meth:`close`; close their peers first.
    """

    def __init__(self, server: ForkServer) -> None:
        """Raises:
        NoHostsError: no hosts can be made here; the message has the reason.
        """
        super().__init__()
        self._hosts: list[_Host] = []
        try:
            for number in range(2):
                made = _Host(server, number, self._hosts[0].pid if self._hosts else 0)
                self.callback(made.close)
                self._hosts.append(made)
        except BaseException:
            self.close()
            raise

    def start(self, number: int, target: str, *args: Any, timeout_s: float) -> peers.Peer:
        """Run ``target(parent, *args)`` in a process on host 0 or 1."""
        return self._hosts[number].start(target, *args, timeout_s=timeout_s)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While the block runs nothing passes between the hosts, as if one of them had lost its power."""
        self._turn(1, "down")
        try:
            yield
        finally:
            self._turn(1, "up")
            self._turn(0, "up")  # waits until it runs

    def _turn(self, number: int, state: str) -> None:
        with self._hosts[number].start(f"{__name__}:turn", state) as child:
            child.result()


class _Host(ForkServer):
    """A fork server that is the first process of a host."""

    def __init__(self, server: ForkServer, number: int, first: int) -> None:
        self._attach(lambda name: server.start(f"{__name__}:become", name, number, first))
        if refusal := self._server.recv():
            self.close()
            raise NoHostsError(refusal)


def turn(parent: Parent, state: str) -> None:
    """On a host: turn its end of the link "up", and wait until it runs, or "down".

    While it is down, what either end sends is lost silently.
    """
    _ip("link", "set", _LINK, state)
    if state == "up":
        _wait_until_running()


def become(parent: Parent, control_name: bytes, number: int, first: int) -> None:
    """In a process of a fork server: be a host, whose first process serves the client at the socket
    ``control_name``.

    ``first`` is the pid of the first host, for the second one. Reports why there can be no host; ``""`` if
    there is. All processes of the host are killed when this one dies.
    """
    control = forkserver.connected(control_name)
    faulthandler.cancel_dump_traceback_later()  # its thread could not enter the namespaces
    with _reporting_refusals(parent):
        _enter(number, first)
        peers.die_with_parent()  # new credentials may have ended that
        if os.fork() == 0:  # only a child is in the namespace of processes
            _be_the_first_process(parent, control, number)
        control.close()
        os.wait()


def _be_the_first_process(parent: Parent, control: socket.socket, number: int) -> None:
    try:
        peers.die_with_parent()
        with _reporting_refusals(parent):
            _furnish(number)
            parent.send("")
        forkserver.serve(parent, control)
    finally:
        os._exit(0)


@contextmanager
def _reporting_refusals(parent: Parent) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        parent.send(f"{f'{e.filename}: ' if e.filename else ''}{e.strerror}")
        raise


def _enter(number: int, first: int) -> None:
    """Enter namespaces of its own, and join the network of the first host."""
    uid, gid = os.geteuid(), os.getegid()
    if first and os.readlink("/proc/self/ns/user") != os.readlink(f"/proc/{first}/ns/user"):
        libc_call("setns", os.open(f"/proc/{first}/ns/user", os.O_RDONLY), _NEW_USER)
    try:
        libc_call("unshare", _NEW_NET)
    except PermissionError:
        libc_call("unshare", _NEW_NET | _NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _ip("link", "set", "lo", "up")
    if first:
        _link(number, first)
    # Programs run before: the first child in a new namespace of processes is that of the host.
    libc_call("unshare", _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS)


def _link(number: int, first: int) -> None:
    """Make a link to the network of the first host, and give both ends an address."""
    here, there = (os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in ("self", first))
    _ip("link", "add", _LINK, "type", "veth", "peer", "name", _LINK, "netns", str(first))
    for net, address in ((there, ADDRESSES[1 - number]), (here, ADDRESSES[number])):
        libc_call("setns", net, _NEW_NET)
        _ip("address", "add", f"{address}/24", "dev", _LINK)
        _ip("link", "set", _LINK, "up")
    for net in (there, here):
        libc_call("setns", net, _NEW_NET)
        _wait_until_running()
        os.close(net)


def _wait_until_running() -> None:
    """Wait briefly until the kernel reports that this end of the link runs: up to a second after both ends
    were turned on. Some libraries ignore an interface that does not run.
    """
    with contextlib.suppress(waits.DeadlineError):
        waits.until(lambda: "state UP" in _ip("link", "show", _LINK), _RUNNING_S)


def _furnish(number: int) -> None:
    """In the host's first process: processes, shared memory, interfaces, a name and a boot id of its own."""
    libc_call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    libc_call("mount", b"proc", b"/proc", b"proc", 0, None)
    libc_call("mount", b"tmpfs", _SHARED_MEMORY, b"tmpfs", 0, None)
    with contextlib.suppress(OSError):  # some containers forbid it: few libraries look for interfaces there
        libc_call("mount", b"sysfs", b"/sys", b"sysfs", _READ_ONLY, None)
    with tempfile.NamedTemporaryFile() as file:
        file.write(f"{uuid.uuid4()}\n".encode())
        file.flush()
        libc_call("mount", file.name.encode(), _BOOT_ID, None, _BIND, None)
    socket.sethostname(f"kvplug-host{number}")


def _ip(*arguments: str) -> str:
    """What the program ``ip`` prints.

    Raises:
        OSError: it fails, or is not there.
    """
    program = shutil.which("ip") or "/sbin/ip"  # which is not on every user's path
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.returncode, f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
