"""How one proven connection becomes a pipe.

The connecting end sends the release of its NCCL. The accepting end answers with a unique id, and sends
another one when the communicator of the first has started: one communicator for each direction. Ids cross
this connection only, and none is made that no peer will use. Both ends say when they have both communicators.
An end that fails says why.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import struct
from typing import Final

import attrs

from kvplug import KvplugError, PeerGoneError, ResourceExhaustedError, TransportError
from kvplug.transport import Connection, Deadline, NamedExhaustion, Watch, WireError, peer_text
from kvplug_pynccl.device import Stream
from kvplug_pynccl.interface import check_reach
from kvplug_pynccl.monitored import MonitoredCommunicator
from kvplug_pynccl.nccl.abi import UNIQUE_ID_BYTES, UniqueId, Version
from kvplug_pynccl.nccl.errors import NcclRemoteError
from kvplug_pynccl.pipe.control import ControlConnection
from kvplug_pynccl.pipe.direction import Direction
from kvplug_pynccl.pipe.pipe import PyncclPipe, PyncclPipeSettings

PURPOSE: Final = "pipe-pynccl"
_MAGIC: Final = b"KVC1"
_STRUCT: Final = struct.Struct(f"<4sBBxxII{UNIQUE_ID_BYTES}s256s")
_SEES_DEATH: Final = 1
_UNUSED: Final = Watch.Terms(True, 0)
_ACCEPTED, _CONNECTED = 0, 1
"""The ranks of the two ends."""
_SHORTEST_SILENCE_S: Final = 0.05
"""However impatient a peer says it is, or this end is: each beats five times in it."""
_MAX_REASON_BYTES: Final = 256
_SAY_WHY_S: Final = 0.2
_LACKS: Final = ("", "descriptors", "threads", "memory", "space")
"""Resources by their numbers in a message, where the version is otherwise."""


class Step(enum.IntEnum):
    """What a join message says."""

    HELLO = 0
    ID = 1
    READY = 2
    FAILED = 3


@attrs.frozen(kw_only=True)
class Join:
    """What both ends say while they become a pipe."""

    step: Step
    terms: Watch.Terms = _UNUSED
    """The sender's own; answered: what was agreed."""
    version: int = 0
    """``NCCL_VERSION_CODE`` of the sender."""
    id: bytes = bytes(UNIQUE_ID_BYTES)
    reason: str = ""
    lacks: str = ""
    """With FAILED: the resource that ran out."""

    def pack(self) -> bytes:
        flags = _SEES_DEATH if self.terms.sees_death else 0
        reason = self.reason.encode("utf-8", "replace")[:_MAX_REASON_BYTES]
        number = _LACKS.index(self.lacks) if self.step is Step.FAILED else self.version
        return _STRUCT.pack(_MAGIC, self.step, flags, self.terms.heartbeat_ms, number, self.id, reason)

    @classmethod
    def unpack(cls, data: bytes, connection: Connection, *steps: Step) -> Join:
        """Raises WireError: it is none of ``steps``, which may come now. TransportError: the peer failed, and
        ResourceExhaustedError if for lack of a resource.
        """
        magic, step, flags, heartbeat_ms, version, id_, reason = _STRUCT.unpack(data)
        if magic != _MAGIC or step not in (*steps, Step.FAILED):
            raise WireError(f"{connection.describe} does not join as this version does")
        text = peer_text(reason.rstrip(b"\0").decode("utf-8", "replace"))
        if step == Step.FAILED:
            why = f"{connection.describe} cannot be the other end of a pipe: {text}"
            if 0 < version < len(_LACKS):
                raise ResourceExhaustedError(why, resource=_LACKS[version])
            raise TransportError(why)
        return cls(
            step=Step(step),
            terms=Watch.Terms(bool(flags & _SEES_DEATH), heartbeat_ms),
            version=version,
            id=id_,
            reason=text,
        )

    def silence_s(self, settings: PyncclPipeSettings) -> float | None:
        """What both ends take for death, by what was agreed; ``None``: they see it."""
        return self.terms.silence_s(settings.heartbeat_timeout_s, at_least_s=_SHORTEST_SILENCE_S)


def join(
    connection: Connection, settings: PyncclPipeSettings, deadline: Deadline, *, accepted: bool
) -> PyncclPipe:
    """One end's pipe over a connection, which it owns from here on, also if it raises.

    ``accepted``: this is the listening end.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe.
        TransportError: NCCL failed, here or there, and why.
    """
    return _PipeBuilder(connection, settings, deadline, _ACCEPTED if accepted else _CONNECTED).build()


class _PipeBuilder:
    """A pipe in the making."""

    def __init__(
        self, connection: Connection, settings: PyncclPipeSettings, deadline: Deadline, rank: int
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._deadline = deadline
        self._rank = rank
        self._communicators: list[MonitoredCommunicator] = []
        self._streams: list[Stream] = []
        self._early: bytes = b""
        """What the peer has sent while NCCL started."""

    def build(self) -> PyncclPipe:
        connection, settings = self._connection, self._settings
        pidfd: int | None = None
        try:
            pidfd = connection.peer.open_pidfd()
            check_reach(connection.peer)
            agreed = self._agree(sees_death=pidfd is not None)
            for _ in range(2):  # one by one: the second may be refused
                self._streams.append(settings.device.new_stream())
            self._start_nccl(agreed)
            self._start_nccl(
                self._receive(Step.ID) if self._rank == _CONNECTED else self._send_id(Join(step=Step.ID))
            )
            self._send(Join(step=Step.READY))
            self._receive(Step.READY)
            directions = [
                Direction(settings.nccl, comm, stream, 1 - self._rank)
                for comm, stream in zip(self._communicators, self._streams, strict=True)
            ]
            control = ControlConnection(connection)
            owned, pidfd = pidfd, None
            # The first direction is that from the accepting end to the other.
            return PyncclPipe(
                control,
                directions[self._rank],
                directions[1 - self._rank],
                settings,
                pidfd=owned,
                silence_s=agreed.silence_s(settings),
            )
        except BaseException as e:
            shortage = NamedExhaustion.of(e, "making a pipe")
            told = shortage or e
            if isinstance(told, KvplugError) and not isinstance(told, PeerGoneError | WireError):
                self._send_reason(str(told), shortage.resource if shortage is not None else "")
            for comm in self._communicators:
                comm.abort()
            for stream in self._streams:
                stream.close()
            connection.close()
            raise
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def _agree(self, *, sees_death: bool) -> Join:
        """What the accepting end answers, which holds for both."""
        ours = Join(
            step=Step.HELLO,
            terms=Watch.Terms.of(self._settings.heartbeat_timeout_s, sees_death=sees_death),
            version=self._settings.nccl.version.code,
        )
        if self._rank == _CONNECTED:
            self._send(ours)
            answer = self._receive(Step.ID)
            self._check_version(answer)
            return answer
        theirs = self._receive(Step.HELLO)
        self._check_version(theirs)
        return self._send_id(attrs.evolve(ours, step=Step.ID, terms=ours.terms.agreed(theirs.terms)))

    def _send_id(self, answer: Join) -> Join:
        """Send ``answer`` with a new unique id, and return it so."""
        answer = attrs.evolve(answer, id=bytes(self._settings.nccl.get_unique_id()))
        self._send(answer)
        return answer

    def _check_version(self, theirs: Join) -> None:
        ours = self._settings.nccl.version
        if theirs.version != ours.code:
            raise TransportError(
                f"{self._connection.describe} has NCCL {Version.of(theirs.version)}, and this end has {ours}:"
                " the ranks of a communicator need the same release"
            )

    def _start_nccl(self, message: Join) -> None:
        comm = MonitoredCommunicator(
            self._settings.nccl,
            UniqueId.of(message.id),
            2,
            self._rank,
            what=f"NCCL with {self._connection.describe}",
            current=self._settings.device.current,
        )
        self._communicators.append(comm)
        try:
            comm.wait_until_settled(self._deadline, self._check_peer)
        except NcclRemoteError:
            if self._is_readable(_SAY_WHY_S):  # the peer says why
                self._check_peer()
            raise

    def _check_peer(self) -> None:
        """While NCCL starts: raise if the peer has failed, or is gone. It may be faster than this end."""
        size = _STRUCT.size
        if len(self._early) == 2 * size or not self._is_readable():
            return
        self._early += self._connection.receive_some(2 * size - len(self._early), self._deadline)
        self._connection.raise_if_declined(self._early, self._deadline)
        if len(self._early) >= size:  # it has started before this end, or has failed
            Join.unpack(self._early[:size], self._connection, Step.ID, Step.READY)
        if len(self._early) == 2 * size:  # it has started before this end, and has failed since
            Join.unpack(self._early[size:], self._connection)

    def _is_readable(self, within_s: float = 0) -> bool:
        poller = select.poll()
        poller.register(self._connection.sock, select.POLLIN)
        return bool(poller.poll(within_s * 1000))

    def _send(self, message: Join) -> None:
        self._connection.send(message.pack(), self._deadline)

    def _send_reason(self, reason: str, lacks: str) -> None:
        """Then read until the peer hangs up: a socket that is closed with unread bytes loses what it sent."""
        deadline = Deadline.after(_SAY_WHY_S)
        with contextlib.suppress(KvplugError, OSError):
            failed = Join(step=Step.FAILED, reason=reason, lacks=lacks if lacks in _LACKS else "")
            self._connection.send(failed.pack(), deadline)
            self._connection.sock.shutdown(socket.SHUT_WR)
            while not deadline.expired:
                self._connection.receive_some(_STRUCT.size, deadline)

    def _receive(self, step: Step) -> Join:
        data, self._early = self._early[: _STRUCT.size], self._early[_STRUCT.size :]
        data += self._connection.receive(_STRUCT.size - len(data), self._deadline)
        return Join.unpack(data, self._connection, step)
