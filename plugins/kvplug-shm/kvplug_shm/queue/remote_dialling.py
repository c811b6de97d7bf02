"""The connection of a remote reader to the writer, and the errors of its failures."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Final

import zmq

from kvplug import AuthenticationError, KvplugError, PeerGoneError
from kvplug.transport import Connection, Credentials, Deadline, Relay
from kvplug_shm.queue.remote_contact import PURPOSE, RemoteContact
from kvplug_shm.queue.remote_frames import MAX_TO_READER
from kvplug_shm.queue.remote_keys import Keys
from kvplug_shm.queue.remote_thread import CONNECTIONS, HANDSHAKE_S, in_words

_UNPROVEN: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,  # it hung up, which is how a writer answers another's keys
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)
PROOF: Final = (
    CONNECTIONS
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""Events of the monitor: how a connection is made, and how it ends."""
_LISTENS_S: Final = 1.0
_NEVER_MS: Final = 7 * 24 * 3600 * 1000
"""Milliseconds until ZeroMQ reconnects: long after the socket is closed. With reconnecting disabled (-1),
ZeroMQ drops unread messages as soon as the connection ends."""
_UCRED: Final = struct.Struct("iII")


def dial_writer(contact: RemoteContact, credentials: Credentials, deadline: Deadline) -> Connection:
    """A proven connection to the writer. Raises as :meth:`kvplug.transport.Connection.dial`."""
    return Connection.dial(contact.contact, credentials, PURPOSE, deadline.remaining())


def use_keys(dealer: zmq.Socket[bytes], keys: Keys, rank: int) -> None:
    """The DEALER of this reader proves itself, and asks the writer to do so."""
    ours = keys.reader(rank)
    dealer.curve_serverkey = keys.writer.public
    dealer.curve_publickey, dealer.curve_secretkey = ours.public, ours.secret


def connect(dealer: zmq.Socket[bytes], connection: Connection) -> Relay:
    """Begin to connect a reader's DEALER over a proven connection, without reconnecting.

    Raises:
        TransportError: connecting cannot begin.
    """
    with in_words(f"{connection.describe} cannot be used"):
        dealer.maxmsgsize = MAX_TO_READER
        dealer.reconnect_ivl = _NEVER_MS
        dealer.handshake_ivl = 0  # joining has a deadline, and a writer that is stopped is alive
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as private:
            private.bind("")  # an abstract name that the kernel chooses
            private.listen()
            private.settimeout(HANDSHAKE_S)
            dealer.connect(f"ipc://@{private.getsockname()[1:].decode()}")
            near = _of_this_process(private)
    return Relay(connection.sock, near, connection.describe)


def failure(event: int, contact: RemoteContact, rank: int) -> tuple[type[KvplugError], str] | None:
    """The error that an event of the monitor before the proof means; ``None`` if it means none."""
    hung_up = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    if event == zmq.EVENT_CLOSED or (hung_up and not _is_listening(contact)):
        return PeerGoneError, f"no process listens at {contact}: the writer of this queue is gone"
    if event in _UNPROVEN:
        text = (
            f"the writer at {contact} and reader rank {rank} did not prove themselves to each other: the"
            " handle is of another queue, or of an earlier run"
        )
        return AuthenticationError, text
    return None


def _of_this_process(listening: socket.socket) -> socket.socket:
    """The next connection that this process has made."""
    while True:
        near, _ = listening.accept()
        pid, _, _ = _UCRED.unpack(near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if pid == os.getpid():
            return near
        near.close()


def _is_listening(contact: RemoteContact) -> bool:
    """Whether a process listens there."""
    host, _, port = contact.contact.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
        return True
    return False
