"""A pair of hosts, and processes on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from kvplug.errors import KvplugError, PeerGoneError
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts import launcher, link

ADDRESSES = launcher.ADDRESSES
"""The addresses of the hosts 0 and 1."""


class NoHostsError(KvplugError):
    """This system does not permit to make hosts; the message says what it refuses."""


class HostPair:
    """Two hosts, joined by a link. On each a fork server has imported what its processes need."""

    def __init__(self, prepare: str, *args: Any) -> None:
        """``prepare`` and ``args`` are those of :class:`.ForkServer`.

        Raises:
            NoHostsError: there can be no such hosts here; the message says why.
        """
        if not ForkServer.works():
            raise NoHostsError("this system has no namespaces")
        self._stack = ExitStack()
        self._servers: list[ForkServer] = []
        try:
            for number in range(2):
                first = self._servers[0].pid if self._servers else 0
                flags = ("-m", launcher.__name__, str(number), str(first))
                server = ForkServer(prepare, *args, flags=flags)
                self._stack.callback(server.close)
                self._servers.append(server)
        except PeerGoneError as e:
            self.close()
            if launcher.REFUSED in str(e):
                raise NoHostsError(str(e).rpartition(launcher.REFUSED)[2].strip()) from e
            raise
        except BaseException:
            self.close()
            raise

    def start(self, host: int, target: str, *args: Any, timeout_s: float) -> peers.Peer:
        """Run ``target(parent, *args)`` in a process on host 0 or 1."""
        return self._servers[host].start(target, *args, timeout_s=timeout_s)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While the block runs nothing passes between the hosts, as if one of them had lost its power."""
        self._turn(False)
        try:
            yield
        finally:
            self._turn(True)

    def _turn(self, on: bool) -> None:
        with self.start(1, f"{__name__}:turn", on, timeout_s=peers.DEFAULT_TIMEOUT_S) as child:
            child.result()

    def close(self) -> None:
        """End both hosts, with all their processes."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def turn(parent: peers.Parent, on: bool) -> None:
    """On a host: turn its end of the link on or off."""
    link.turn(on)
