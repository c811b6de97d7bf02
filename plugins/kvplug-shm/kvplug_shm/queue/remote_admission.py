"""The writer's ROUTER, and its admission of remote readers: ZeroMQ asks here whether to accept a connection's
public key (ZAP, RFC 27)."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from typing import Final

import zmq

from kvplug_shm.queue.remote_frames import MAX_TO_WRITER
from kvplug_shm.queue.remote_keys import KeyPair
from kvplug_shm.queue.remote_thread import in_words

_ADDRESS: Final = "inproc://zeromq.zap.01"  # one for each context, so the context is the writer's own
_DOMAIN: Final = b"kvplug"
_VERSION: Final = b"1.0"


class RemoteAdmission:
    """Accepts the keys of the readers' ranks. Used by the thread that owns the writer's socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Mapping[int, bytes]) -> None:
        """``keys`` holds each rank's public key, as its 32 bytes."""
        with in_words("no reader can be admitted"):
            self.socket = context.socket(zmq.REP)
            self.socket.linger = 0
            try:
                self.socket.bind(_ADDRESS)
            except BaseException:
                self.socket.close()
                raise
        self._keys = keys
        self.refused = 0
        """Connections that were refused for an unknown key."""

    def answer(self) -> None:
        """Answer all pending requests."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = self._rank(request)
            if rank is None:
                self.refused += 1
                verdict = (b"400", b"this key opens nothing here", b"")
            else:
                verdict = (b"200", b"", b"%d" % rank)
            self.socket.send_multipart([_VERSION, request[1] if len(request) > 1 else b"", *verdict, b""])

    def _rank(self, request: list[bytes]) -> int | None:
        if len(request) != 7 or request[0] != _VERSION or request[2] != _DOMAIN or request[5] != b"CURVE":
            return None
        found = [rank for rank, key in self._keys.items() if hmac.compare_digest(key, request[6])]
        return found[0] if found else None


def rank_of(frame: zmq.Frame) -> int:
    """The rank that was proved by the connection on which ``frame`` arrived."""
    return int(frame["User-Id"])


def descriptor_of(frame: zmq.Frame) -> int:
    """The descriptor of the connection on which ``frame`` arrived."""
    return int(frame.get(zmq.SRCFD))


def listen(socket: zmq.Socket[bytes], ours: KeyPair) -> str:
    """Bind the writer's ROUTER to an abstract Unix socket, for connections that this process makes and that
    :class:`RemoteAdmission` accepts.

    Returns its name.

    Raises:
        TransportError: listening failed.
    """
    name = f"kvplug-{os.getpid()}-{secrets.token_hex(12)}"
    with in_words("readers on other hosts cannot be served"):
        socket.curve_server = 1
        socket.curve_publickey, socket.curve_secretkey = ours.public, ours.secret
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler every peer is refused, not admitted
        socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
        socket.maxmsgsize = MAX_TO_WRITER
        socket.router_mandatory = 1
        socket.bind(f"ipc://@{name}")
    return name
