"""How one proven connection becomes a pipe.

Each end sends its release of NCCL. The accepting end sends a unique id, and another one when the communicator
of the first has started: one communicator for each direction. Ids cross this connection only, and are made
only for a peer that uses them. Each end confirms that it has both communicators.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Final

import attrs

from kvplug import TimeoutError, TransportError
from kvplug.transport import Connection, Deadline, OfferPipe, WireError
from kvplug_pynccl.interface import check_reach
from kvplug_pynccl.monitored import MonitoredCommunicator
from kvplug_pynccl.nccl.abi import UNIQUE_ID_BYTES, UniqueId, Version
from kvplug_pynccl.nccl.errors import NcclRemoteError
from kvplug_pynccl.pipe.pipe import PyncclPipe, PyncclPipeSettings

PURPOSE: Final = "pipe-pynccl"
_ACCEPTED, _CONNECTED = 0, 1
"""The ranks of the two ends."""
_REASON_S: Final = 0.2
"""Seconds that a peer whose NCCL has failed may take to send the reason."""


@attrs.frozen(kw_only=True)
class Hello:
    """The first message of each end."""

    version: int
    """``NCCL_VERSION_CODE``."""


def join(
    connection: Connection, settings: PyncclPipeSettings, deadline: Deadline, *, accepted: bool
) -> PyncclPipe:
    """Return one end's pipe over a connection, which is taken over. ``accepted``: this is the listening end.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe.
        TransportError: NCCL failed, here or there, and why.
    """
    with OfferPipe.Join.over(connection, settings.heartbeat_timeout_s, deadline) as joined:
        check_reach(connection.peer)
        return _PipeBuilder(joined, settings, _ACCEPTED if accepted else _CONNECTED).build()


class _PipeBuilder:
    """A pipe in the making."""

    def __init__(self, join: OfferPipe.Join, settings: PyncclPipeSettings, rank: int) -> None:
        self._join = join
        self._settings = settings
        self._rank = rank
        self._communicators: list[MonitoredCommunicator] = []
        self._early: deque[Any] = deque()
        """What the peer has sent while NCCL started."""

    def build(self) -> PyncclPipe:
        try:
            ours = self._settings.nccl.version
            is_accepting = self._rank == _ACCEPTED
            theirs = self._join.exchange(Hello, lambda: Hello(version=ours.code), accepted=is_accepting)
            if theirs.version != ours.code:
                raise TransportError(
                    f"{self._join.peer} has NCCL {Version.of(theirs.version)}, and this end has {ours}: the"
                    " ranks of a communicator need the same release"
                )
            for _ in range(2):
                self._start_nccl(self._new_id() if is_accepting else self._receive())
            self._join.send(True)
            if self._receive() is not True:
                raise self._unexpected()
            # The first direction is that from the accepting end to the other.
            outgoing, incoming = self._communicators[self._rank], self._communicators[1 - self._rank]
            return PyncclPipe(self._join, outgoing, incoming, 1 - self._rank, self._settings)
        except BaseException:
            for comm in self._communicators:
                comm.abort()
            raise

    def _new_id(self) -> bytes:
        made = bytes(self._settings.nccl.get_unique_id())
        self._join.send(made)
        return made

    def _start_nccl(self, unique_id: Any) -> None:
        if not isinstance(unique_id, bytes) or len(unique_id) != UNIQUE_ID_BYTES:
            raise self._unexpected()
        comm = MonitoredCommunicator(
            self._settings.nccl,
            UniqueId.of(unique_id),
            2,
            self._rank,
            what=f"NCCL with {self._join.peer}",
            current=self._settings.device.current,
        )
        self._communicators.append(comm)
        try:
            comm.wait_until_settled(self._join.deadline, self._check_peer)
        except NcclRemoteError:
            self._check_peer(_REASON_S)  # it sends the reason
            raise

    def _check_peer(self, within_s: float = 0) -> None:
        """While NCCL starts: raise if the peer has failed, or is gone. It may be faster than this end."""
        if len(self._early) < 2:
            with contextlib.suppress(TimeoutError):
                value = self._join.receive(within_s)
                if value is not True and not isinstance(value, bytes):
                    raise self._unexpected()
                self._early.append(value)

    def _receive(self) -> Any:
        return self._early.popleft() if self._early else self._join.receive()

    def _unexpected(self) -> WireError:
        return WireError(f"{self._join.peer} does not join as this version does")
