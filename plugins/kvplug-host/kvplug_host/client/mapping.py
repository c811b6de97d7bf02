"""The memory of a store in another process, mapped here for reading."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import threading
from typing import Final

from kvplug import CapacityError, KvplugError
from kvplug.transport import (
    Connection,
    Credentials,
    Deadline,
    Memfd,
    NamedExhaustion,
    WireError,
    close_after_fork,
)
from kvplug_host.arena.addresses import AddressSpace
from kvplug_host.client.put_memory import PutMemory
from kvplug_host.protocol import ANSWER, MEMORY_PURPOSE, WELCOME, Hello

_log = logging.getLogger(__name__)

_HAND_OVER_S: Final = 10.0
"""How long the other process may take to hand over a segment. It is not a job's time: a job that has little
must not end the mapping for all others."""


class Mapping:
    """Segments of the other process, each mapped when a page in it is read first.

    Raises:
        KvplugError: the memory is not handed to this process.
    """

    def __init__(self, hello: Hello, credentials: Credentials, deadline: Deadline) -> None:
        self.segment_bytes = hello.segment_bytes
        self.num_segments = hello.num_segments
        self.lock = threading.Lock()
        """Held while a segment is asked for and received."""
        self._mapped: set[int] = set()
        self.put_memory = PutMemory()
        """What is lent to the store. Stays usable when this is closed."""
        self._connection: Connection | None = Connection.dial(
            hello.memory, credentials, MEMORY_PURPOSE, deadline.remaining()
        )
        try:
            if not self._connection.is_same_user:
                raise WireError("the store's memory belongs to another user")
            self.put_memory.hand_over(self._connection, hello.ticket, deadline)
            self._connection.receive(len(WELCOME), deadline)
            self._space = AddressSpace(hello.segment_bytes * hello.num_segments)
        except BaseException:
            self._connection.close()
            raise
        self.view = self._space.view
        """All segments, one after the other. To be read only, and only where they are mapped."""
        self.words = self.view.cast("Q")
        close_after_fork(self)

    def lacks(self, number: int) -> bool:
        """Whether the segment is not mapped yet."""
        return number not in self._mapped

    def receive(self, number: int) -> None:
        """Map a segment, which the other process was asked for just now.

        Raises:
            WireError: it hands over something else.
            CapacityError, ResourceExhaustedError: it cannot, or this process cannot map it.
            TimeoutError, PeerGoneError: it does not.
        """
        connection = self._connection
        if connection is None:
            raise WireError("the connection for memory is closed")
        answer, fds = connection.receive_fds(ANSWER.size, 1, Deadline.after(_HAND_OVER_S))
        try:
            found, nbytes = ANSWER.unpack(answer)
            if not nbytes or not fds:
                raise CapacityError("the store cannot hand out its memory: it has no descriptor left")
            if found != number or nbytes != self.segment_bytes:
                raise WireError("the store handed out another segment than it was asked for")
            with NamedExhaustion("memory of the store cannot be mapped", CapacityError):
                Memfd.check(fds[0], nbytes, writable=False)
                self._space.place(fds[0], number * nbytes, nbytes, writable=False)
            self._mapped.add(number)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Hand back the connection. The memory is unmapped with the last copy out of it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
            connection.close()

    def _after_fork_in_child(self) -> None:
        self._connection = None  # it closes itself


def offered_mapping(hello: Hello, credentials: Credentials, deadline: Deadline) -> Mapping | None:
    """The memory that a store offers in its first message; ``None``: it cannot be mapped, and pages come over
    the pipe."""
    if not hello.memory or platform.machine() != "x86_64":
        return None
    try:
        return Mapping(hello, credentials, deadline)
    except KvplugError as e:
        _log.info("the memory of the store is not mapped, pages come over a pipe: %s", e)
    return None
