"""Passing descriptors between two processes of one host, together with the bytes that announce them."""

from __future__ import annotations

import array
import builtins
import errno
import os
import socket
from collections.abc import Sequence
from typing import Final

from kvplug.errors import KvplugError, PeerGoneError, TimeoutError, WireError
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion, raise_if_exhausted
from kvplug.net.trust.connection import Connection

_SIZE_OF_ONE: Final = array.array("i").itemsize


def send_fds(connection: Connection, data: bytes, fds: Sequence[int], deadline: Deadline) -> None:
    """Send ``data``, at least a byte, and with it the descriptors, which the caller still owns.

    Raises:
        TimeoutError, PeerGoneError: the other end does not receive it, or is gone.
        ResourceExhaustedError: too many descriptors are under way.
    """
    if not data:
        raise ValueError("descriptors go along with bytes, and there are none")
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock, sent = connection.sock, 0
    try:
        while sent < len(data):
            sock.settimeout(_seconds(deadline))
            sent += sock.sendmsg([memoryview(data)[sent:]], control)
            control = []
        sock.settimeout(None)
    except OSError as e:
        raise _in_words(e, connection, "took no memory in time") from e


def recv_fds(connection: Connection, size: int, max_fds: int, deadline: Deadline) -> tuple[bytes, list[int]]:
    """The next ``size`` bytes and the descriptors with them, which the caller then owns; close-on-exec.

    Raises:
        TimeoutError, PeerGoneError: they did not arrive; the connection is unusable.
        WireError: more than ``max_fds`` arrived.
        ResourceExhaustedError: this process can open no more descriptors; or the peer lacks something.
    """
    data, fds = bytearray(), list[int]()
    sock = connection.sock
    try:
        while len(data) < size:
            sock.settimeout(_seconds(deadline))
            room = socket.CMSG_SPACE(max_fds * _SIZE_OF_ONE)
            chunk, controls, flags, _ = sock.recvmsg(size - len(data), room, socket.MSG_CMSG_CLOEXEC)
            came = _fds_in(controls)
            fds += came
            if len(fds) > max_fds or (flags & socket.MSG_CTRUNC and len(came) >= max_fds):
                raise WireError(f"{connection.describe} handed over more than {max_fds} descriptors")
            if flags & socket.MSG_CTRUNC:
                with NamedExhaustion(f"taking a descriptor from {connection.describe}"):
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not chunk:
                raise PeerGoneError(f"{connection.describe} hung up while memory was handed over")
            data += chunk
            connection.raise_if_declined(bytes(data), deadline)
        sock.settimeout(None)
        return bytes(data), fds
    except BaseException as e:
        for fd in fds:
            os.close(fd)
        if isinstance(e, OSError) and not isinstance(e, KvplugError):
            raise _in_words(e, connection, "handed no memory over in time") from e
        raise


def _fds_in(controls: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in controls:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % _SIZE_OF_ONE])
    return fds.tolist()


def _in_words(error: OSError, connection: Connection, late: str) -> Exception:
    raise_if_exhausted(error, f"handing over memory with {connection.describe}")
    if isinstance(error, builtins.TimeoutError):
        return TimeoutError(f"{connection.describe} {late}")
    return PeerGoneError(f"{connection.describe} hung up while memory was handed over")


def _seconds(deadline: Deadline) -> float | None:
    """For ``settimeout``, where 0 would mean not to wait at all."""
    left = deadline.remaining()
    return None if left is None else max(0.001, left)
