"""A pair of hosts, and processes on them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvplug import KvplugError
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts import host, link

ADDRESSES = host.ADDRESSES
"""The addresses of the hosts 0 and 1."""


class NoHostsError(KvplugError):
    """This system does not permit to make hosts; the message says what it refuses."""


class HostPair(ExitStack):
    """Two hosts, joined by a link. Their processes are forked, and have imported what a fork server has. Both
    hosts end with the block, or with :meth:`close`; close their peers first.
    """

    def __init__(self, server: ForkServer) -> None:
        """Raises:
        NoHostsError: there can be no hosts here; the message says why.
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
        self._call(1, "turn", False)
        try:
            yield
        finally:
            self._call(1, "turn", True)
            for number in range(2):
                self._call(number, "wait_until_running")

    def _call(self, number: int, function: str, *args: Any) -> None:
        """Call a function of :mod:`.link` on a host."""
        target = f"{__name__}:call"
        with self._hosts[number].start(target, function, *args) as child:
            child.result()


class _Host(ForkServer):
    """A fork server that is the first process of a host."""

    def __init__(self, server: ForkServer, number: int, first: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel chooses an abstract name
            listener.listen()
            listener.settimeout(peers.DEFAULT_TIMEOUT_S)
            process = server.start(f"{host.__name__}:become", listener.getsockname(), number, first)
            try:
                control, _ = listener.accept()
            except BaseException:
                process.close()
                raise
        control.settimeout(None)
        self._attach(process, control)
        if refusal := process.recv():
            self.close()
            raise NoHostsError(refusal)


def call(parent: peers.Parent, function: str, *args: Any) -> None:
    """On a host: call a function of :mod:`.link`."""
    getattr(link, function)(*args)
