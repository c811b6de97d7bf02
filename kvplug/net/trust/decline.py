"""What a process says to a peer that it has no resources for now, in place of what the peer waits for.

A frame of the kind ``LACK``: channels and the joining of connections recognise it, so that the peer does not
take the end of the connection for a fault, and may try again.
"""

from __future__ import annotations

import contextlib
import socket

from kvplug.errors import PeerGoneError, ResourceExhaustedError, WireError
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.connection import Connection
from kvplug.net.wire import values
from kvplug.net.wire.frames import HEADER_SIZE, MAGIC, FrameKind, decode_header, encode_header

_KIND_AT = 6
_MAX_REASON = 1000  # characters
_MAX_PAYLOAD = 8192


def decline(sock: socket.socket, shortage: ResourceExhaustedError) -> None:
    """Say what this process lacks. Never waits; the peer sees the end of the connection otherwise."""
    said = values.encode([shortage.resource, str(shortage)[:_MAX_REASON]])
    with contextlib.suppress(OSError):
        sock.send(encode_header(FrameKind.LACK, len(said)) + said, socket.MSG_DONTWAIT)


def shortage_in(payload: bytes | bytearray, who: str) -> ResourceExhaustedError:
    """What the payload of such a frame says.

    Raises:
        WireError: it says nothing of that kind.
    """
    match values.decode(payload):
        case [str(resource), str(reason)]:
            return ResourceExhaustedError(
                f"{who} has no resources for it now: {peer_text(reason)}", resource=peer_text(resource)
            )
    raise WireError(f"{who} declined a connection and did not say what it lacks")


def raise_if_declined(connection: Connection, data: bytes, deadline: Deadline) -> None:
    """Where a message of another kind may be such a frame. ``data`` are its first bytes; the rest is read.

    Raises:
        ResourceExhaustedError: it is; the peer's process lacks that resource.
        PeerGoneError, WireError: it is, and is not whole.
    """
    if data[: len(MAGIC)] != MAGIC or data[_KIND_AT : _KIND_AT + 1] != bytes([FrameKind.LACK]):
        return
    who = connection.describe
    data = _up_to(connection, data, HEADER_SIZE, deadline)
    header = decode_header(data[:HEADER_SIZE], max_length=_MAX_PAYLOAD)
    data = _up_to(connection, data, HEADER_SIZE + header.length, deadline)
    raise shortage_in(data[HEADER_SIZE:], who)


def _up_to(connection: Connection, data: bytes, nbytes: int, deadline: Deadline) -> bytes:
    left = deadline.remaining()
    connection.sock.settimeout(None if left is None else max(0.001, left))
    try:
        while len(data) < nbytes and (chunk := connection.sock.recv(nbytes - len(data))):
            data += chunk
    except OSError as e:
        raise PeerGoneError(f"{connection.describe} hung up while it said what it lacks") from e
    if len(data) < nbytes:
        raise PeerGoneError(f"{connection.describe} hung up while it said what it lacks")
    return data
