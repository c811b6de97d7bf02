"""The memory of a store in another process, mapped here for reading."""

from __future__ import annotations

import logging
import os
import platform

from kvplug import KvplugError
from kvplug.transport import Connection, Credentials, Deadline, Memfd, Segment, WireError
from kvplug_host.client.put_memory import PutMemory
from kvplug_host.protocol import MEMORY_PURPOSE, WELCOME, Hello

_log = logging.getLogger(__name__)


class Mapping:
    """The store's memory, and memory that is lent to the store.

    Raises:
        KvplugError: the memory is not handed to this process.
    """

    def __init__(self, hello: Hello, credentials: Credentials, deadline: Deadline) -> None:
        connection = Connection.dial(hello.memory, credentials, MEMORY_PURPOSE, deadline.remaining())
        fds: list[int] = []
        try:
            if not connection.is_same_user:
                raise WireError("the store's memory belongs to another user")
            self.put_memory = PutMemory(connection, hello.ticket, deadline)
            _, fds = connection.receive_fds(len(WELCOME), 1, deadline)
            if not fds:
                raise WireError("the store did not hand out its memory")
            Memfd.check(fds[0], hello.memory_bytes, writable=False)
            self.view = Segment.map(fds[0], hello.memory_bytes, writable=False).view
            """To be read only. It is unmapped with the last copy out of it."""
        finally:
            connection.close()
            for fd in fds:
                os.close(fd)
        self.words = self.view.cast("Q")


def offered_mapping(hello: Hello, credentials: Credentials, deadline: Deadline) -> Mapping | None:
    """The memory that a store offers in its first message; ``None``: it cannot be mapped, and pages come over
    the pipe."""
    if not hello.memory or platform.machine() != "x86_64":
        return None
    try:
        return Mapping(hello, credentials, deadline)
    except (KvplugError, OSError) as e:
        _log.info("the memory of the store is not mapped, pages come over a pipe: %s", e)
    return None
