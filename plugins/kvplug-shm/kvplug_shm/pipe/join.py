"""Turning one proven connection into a pipe.

The connecting end sends its heartbeat terms. The accepting end creates the memory, passes its descriptor with
its answer, and waits for the confirmation that it was mapped. Every message is one fixed struct.
"""

from __future__ import annotations

import os
import struct
from typing import Final, Self

import attrs

from kvplug import ResourceExhaustedError, TransportError
from kvplug.transport import Connection, Deadline, Segment, Watch, WireError
from kvplug_shm.pipe.geometry import LARGEST_BYTES, LINE, SMALLEST_BYTES, Pieces, segment_size
from kvplug_shm.pipe.pipe import Shared, ShmPipe, ShmPipeSettings

PURPOSE: Final = "pipe-shm"
_MAGIC: Final = b"KVS1"
_STRUCT: Final = struct.Struct("<4sBBxxIII")
_HELLO, _MEMORY, _REFUSED, _READY = range(4)
_SEES_DEATH: Final = 1
_LACKS: Final = ("", "descriptors", "threads", "memory", "space")
"""What a refusing end has no more of, by its number: :attr:`Join.slots` of its answer."""
_UNUSED: Final = Watch.Terms(True, 0)
_SHORTEST_BEAT_S: Final = 0.01
"""The shortest interval of heartbeats, whatever the two ends ask for: each one wakes both watchers."""


@attrs.frozen(kw_only=True)
class Join:
    """The message of both ends while they join."""

    step: int
    terms: Watch.Terms = _UNUSED
    """The sender's own; answered: what was agreed."""
    slots: int = 0
    slot_bytes: int = 0

    def pack(self) -> bytes:
        flags = _SEES_DEATH if self.terms.sees_death else 0
        return _STRUCT.pack(_MAGIC, self.step, flags, self.terms.heartbeat_ms, self.slots, self.slot_bytes)

    @classmethod
    def unpack(cls, data: bytes, connection: Connection, *steps: int) -> Self:
        """Raises WireError if the message is none of the ``steps`` that are expected now."""
        magic, step, flags, heartbeat_ms, slots, slot_bytes = _STRUCT.unpack(data)
        if magic != _MAGIC or step not in steps:
            raise WireError(f"{connection.describe} does not join as this version does")
        return cls(
            step=step,
            terms=Watch.Terms(bool(flags & _SEES_DEATH), heartbeat_ms),
            slots=slots,
            slot_bytes=slot_bytes,
        )

    def heartbeat_interval_s(self, settings: ShmPipeSettings) -> float | None:
        """Seconds between heartbeats of both ends, as agreed; ``None``: no heartbeats."""
        return self.terms.interval_s(settings.heartbeat_timeout_s, at_least_s=_SHORTEST_BEAT_S)


def connect(control: Connection, settings: ShmPipeSettings, deadline: Deadline) -> ShmPipe:
    """The connecting end's pipe over a connection, which it owns from here on.

    Raises:
        TimeoutError, PeerGoneError, WireError, TransportError: there is no pipe; the connection is closed.
        ResourceExhaustedError: one of the two ends has no memory or descriptor for it.
    """
    pidfd: int | None = None
    fds: list[int] = []
    try:
        pidfd = control.peer.open_pidfd()
        ours = Watch.Terms.of(settings.heartbeat_timeout_s, sees_death=pidfd is not None)
        control.send(Join(step=_HELLO, terms=ours).pack(), deadline)
        data, fds = control.receive_fds(_STRUCT.size, 1, deadline)
        answer = Join.unpack(data, control, _MEMORY, _REFUSED)
        if answer.step == _REFUSED:
            raise _refusal(control.describe, answer.slots)
        ring_bytes = answer.slots * answer.slot_bytes
        if len(fds) != 1 or ring_bytes % LINE or not SMALLEST_BYTES <= ring_bytes <= LARGEST_BYTES:
            raise WireError(
                f"{control.describe} hands over {len(fds)} descriptors for {answer.slots} slots of"
                f" {answer.slot_bytes} bytes"
            )
        segment = Segment.attach(fds[0], segment_size(ring_bytes))
        control.send(Join(step=_READY).pack(), deadline)
        owned, pidfd = pidfd, None
        return ShmPipe(
            control,
            _shared(segment, answer.slots, answer.slot_bytes, settings, accepted=False),
            settings,
            pidfd=owned,
            heartbeat_interval_s=answer.heartbeat_interval_s(settings),
        )
    except BaseException:
        control.close()
        raise
    finally:
        _close(pidfd, *fds)


def accept(control: Connection, settings: ShmPipeSettings, deadline: Deadline) -> ShmPipe:
    """The same for the accepting end. Raises the same; the connection is open then, so that what ran out can
    be told to the peer, and the caller closes it.
    """
    pidfd: int | None = None
    fd: int | None = None
    try:
        pidfd = control.peer.open_pidfd()
        data = control.receive(_STRUCT.size, deadline)
        hello = Join.unpack(data, control, _HELLO)
        ours = Watch.Terms.of(settings.heartbeat_timeout_s, sees_death=pidfd is not None)
        try:
            segment, fd = Segment.create("pipe", segment_size(settings.slots * settings.slot_bytes))
        except TransportError as e:
            lacks = e.resource if isinstance(e, ResourceExhaustedError) else ""
            control.send(Join(step=_REFUSED, slots=_LACKS.index(lacks)).pack(), deadline)
            raise
        answer = Join(
            step=_MEMORY,
            terms=ours.agreed(hello.terms),
            slots=settings.slots,
            slot_bytes=settings.slot_bytes,
        )
        # Zeroed memory is two empty rings: there is nothing to initialise.
        control.send(answer.pack(), deadline, (fd,))
        data = control.receive(_STRUCT.size, deadline)
        Join.unpack(data, control, _READY)
        owned, pidfd = pidfd, None
        return ShmPipe(
            control,
            _shared(segment, settings.slots, settings.slot_bytes, settings, accepted=True),
            settings,
            pidfd=owned,
            heartbeat_interval_s=answer.heartbeat_interval_s(settings),
        )
    finally:
        _close(pidfd, fd)


def _refusal(peer: str, lacks: int) -> TransportError:
    """The error of a peer that cannot make the memory."""
    resource = _LACKS[lacks] if lacks < len(_LACKS) else ""
    text = f"{peer} cannot make the memory of a pipe, and its log says why"
    if not resource:
        return TransportError(text)
    return ResourceExhaustedError(f"{text}: it has no free {resource}", resource=resource)


def _shared(
    segment: Segment, slots: int, slot_bytes: int, settings: ShmPipeSettings, *, accepted: bool
) -> Shared:
    ring_bytes = slots * slot_bytes
    pieces = Pieces.of(ring_bytes, slot_bytes)
    return Shared(segment=segment, ring_bytes=ring_bytes, pieces=pieces, accepted=accepted)


def _close(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)
