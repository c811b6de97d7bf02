"""One message: a header on the socket, and with it the descriptor of the memory that has the content.

So a message is in the reader's hands, whole, as soon as the writer's call has returned, also if the writer is
killed then; and the bytes on the socket are so few that the kernel takes them at once.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from kvplug import TransportError
from kvplug.transport import Memfd, NamedExhaustion, WireError

HEADER = struct.Struct("<BQ")
"""Kind, and number of bytes."""
JOIN = struct.Struct("<q")
"""What a reader sends first: its rank. From then on it sends single bytes, of :class:`News`."""


class Kind(enum.IntEnum):
    """What the writer sends."""

    VALUE = 0
    CHUNK = 1
    READY = 2
    JOINED = 3
    REFUSED = 4
    """The reason follows, as UTF-8."""


class News(enum.IntEnum):
    """What a reader sends."""

    TAKEN = 0
    READY = 1
    LEFT = 2


@contextmanager
def named() -> Iterator[None]:
    """Says what failed when the system has no descriptor or memory for a message."""
    with NamedExhaustion("making the memory of a message"):
        try:
            yield
        except OSError as e:
            raise TransportError(f"no memory for a message: {e}") from e


class Memory:
    """The memory of a message that is being written."""

    def __init__(self, nbytes: int) -> None:
        with named():
            self.fd = Memfd.create("kvplug-relay", max(1, nbytes))  # there is no empty mapping
        try:
            with named():
                self.map = mmap.mmap(self.fd, max(1, nbytes))
        except BaseException:
            os.close(self.fd)
            raise

    def seal(self) -> None:
        """No process can write it, or take it away under a reader, from here on."""
        with named():
            Memfd.seal(self.fd, read_only=True)


def map_received(fd: int, nbytes: int) -> mmap.mmap:
    """The content of a message that has come, read-only. Takes the descriptor, also if it raises.

    Raises:
        WireError: it is not what a writer sends.
        ResourceExhaustedError: this process has no room for it.
    """
    try:
        with named():
            Memfd.check(fd, max(1, nbytes), writable=False)
            return mmap.mmap(fd, max(1, nbytes), prot=mmap.PROT_READ)
    except OverflowError as e:
        raise WireError(f"a message of {nbytes} bytes was announced") from e
    finally:
        os.close(fd)
