"""Whom a queue's writer lets in: ZeroMQ asks here for the public key of each connection (ZAP, RFC 27)."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

import zmq

_ADDRESS: Final = "inproc://zeromq.zap.01"  # one for each context, so the context is the writer's own
DOMAIN: Final = b"kvplug"
_VERSION: Final = b"1.0"


class Admission:
    """Answers with the rank whose key it is. Used by the thread that owns the writer's socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Mapping[int, bytes]) -> None:
        """``keys`` holds each rank's public key, as its 32 bytes."""
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)
        self._keys = keys
        self.refused = 0
        """Connections that had another key."""

    def answer(self) -> None:
        """All requests that have come."""
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
        if len(request) != 7 or request[0] != _VERSION or request[2] != DOMAIN or request[5] != b"CURVE":
            return None
        found = [rank for rank, key in self._keys.items() if hmac.compare_digest(key, request[6])]
        return found[0] if found else None


def rank_of(frame: zmq.Frame) -> int:
    """The rank that the connection has proved itself for by which ``frame`` came."""
    return int(frame["User-Id"])
