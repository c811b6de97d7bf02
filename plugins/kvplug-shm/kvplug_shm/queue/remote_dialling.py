"""The connection of a remote reader to the writer, and the errors of its failures."""

from __future__ import annotations

import socket
from typing import Final

import zmq

from kvplug import AuthenticationError, KvplugError, PeerGoneError
from kvplug_shm.queue.remote_contact import RemoteContact
from kvplug_shm.queue.remote_frames import MAX_TO_READER
from kvplug_shm.queue.remote_keys import Keys
from kvplug_shm.queue.remote_thread import CONNECTIONS, in_words

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


def dial(dealer: zmq.Socket[bytes], contact: RemoteContact, keys: Keys, rank: int) -> None:
    """Begin to connect a reader's DEALER, without reconnecting.

    Raises:
        TransportError: connecting cannot begin.
    """
    ours = keys.reader(rank)
    with in_words(f"{contact} cannot be reached"):
        dealer.curve_serverkey = keys.writer.public
        dealer.curve_publickey, dealer.curve_secretkey = ours.public, ours.secret
        dealer.maxmsgsize = MAX_TO_READER
        dealer.reconnect_ivl = _NEVER_MS
        dealer.handshake_ivl = 0  # joining has a deadline, and a writer that is stopped is alive
        dealer.ipv6 = ":" in contact.host
        dealer.connect(contact.endpoint)


def failure(event: int, contact: RemoteContact, rank: int) -> tuple[type[KvplugError], str] | None:
    """The error that an event of the monitor before the proof means; ``None`` if it means none."""
    hung_up = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    if event == zmq.EVENT_CLOSED or (hung_up and not _is_listening(contact)):
        return PeerGoneError, f"no process listens at {contact}: the writer of this queue is gone"
    if event in _UNPROVEN:
        text = (
            f"the writer at {contact} and reader rank {rank} did not prove themselves to each other: the"
            " secrets differ (check KVPLUG_SECRET or secret_file on both ends), the handle is of an earlier"
            " run, or something else listens there"
        )
        return AuthenticationError, text
    return None


def _is_listening(contact: RemoteContact) -> bool:
    """Whether a process listens there."""
    try:
        socket.create_connection((contact.host, contact.port), _LISTENS_S).close()
    except OSError:
        return False
    return True
