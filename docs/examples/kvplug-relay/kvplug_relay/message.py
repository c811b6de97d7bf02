"""One message: a header on the socket, and with it the descriptor of the memory that holds the content.

When the writer's call returns, the kernel has the whole message for the reader, even if the writer is killed
then. The header is so small that the kernel accepts it without waiting.
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
"""The kind, and the number of bytes of the content."""
JOIN = struct.Struct("<q")
"""The first message of a reader: its rank. All later messages are single bytes, see :class:`News`."""


class Kind(enum.IntEnum):
    """The kinds of message that the writer sends."""

    VALUE = 0
    CHUNK = 1
    READY = 2
    JOINED = 3
    REFUSED = 4
    """The reason follows the header, as UTF-8."""


class News(enum.IntEnum):
    """The single bytes that a reader sends."""

    TAKEN = 0
    READY = 1
    LEFT = 2


@contextmanager
def named() -> Iterator[None]:
    """A context that names the operation if the system has no descriptor or memory for a message."""
    with NamedExhaustion("making the memory of a message"):
        try:
            yield
        except OSError as e:
            raise TransportError(f"the memory of a message cannot be made: {e}") from e


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
        """Seal the memory: from now on no process can write it or make it smaller."""
        with named():
            Memfd.seal(self.fd, read_only=True)


def map_received(fd: int, nbytes: int) -> mmap.mmap:
    """Map the content of a received message, read-only. Closes the descriptor, even if it raises.

    Raises:
        WireError: the memory is not sealed, or does not have this size.
        ResourceExhaustedError: this process has no address space or descriptor for the mapping.
    """
    try:
        with named():
            Memfd.check(fd, max(1, nbytes), writable=False)
            return mmap.mmap(fd, max(1, nbytes), prot=mmap.PROT_READ)
    except OverflowError as e:
        raise WireError(f"a message of {nbytes} bytes was announced, which is too large") from e
    finally:
        os.close(fd)
