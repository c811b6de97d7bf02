"""The ring that the processes of one host share: words, entries, and the bytes of messages, in one segment.

    words      the ring's (see :mod:`kvplug_shm.ring.protocol`), then one for each end that waits to be ready
    entries    one for each place: which message, what it is, and where its bytes lie
    arena      the bytes, in extents that the writer allocates

Pages of the arena take memory once they are written.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from typing import Final, NamedTuple

import attrs

from kvplug import ConfigError
from kvplug.net.wire import aligned
from kvplug.transport import Segment, WireError
from kvplug_shm.memory.words import Words
from kvplug_shm.queue.extents import small_nbytes
from kvplug_shm.ring import protocol

VALUE: Final = 1
CHUNK: Final = 2
_ENTRY: Final = struct.Struct("<QQQQQ")
_ENTRY_NBYTES: Final = 64
_PAGE: Final = mmap.PAGESIZE
_MARGIN: Final = 4096
"""Extra bytes of a chunk, so that a value whose tensors fill a chunk still fits with its head."""


class QueueMessage(NamedTuple):
    """One message. In the ring's memory it is valid until it was released."""

    raw: bool
    """Whether it is a chunk of bytes; otherwise it is a value."""
    head: memoryview
    """Of a value: the head, for :func:`kvplug.net.wire.decode_out_of_band`. Of a chunk: empty."""
    body: memoryview
    """Of a value: the memories of its tensors. Of a chunk: its bytes."""


@attrs.frozen
class Sizes:
    """The sizes that the ends agree on, and the layout of the segment that follows from them."""

    n_reader: int
    max_chunks: int
    max_chunk_bytes: int
    max_message_bytes: int

    def __attrs_post_init__(self) -> None:
        """Raises ConfigError: no segment can be so large."""
        if self.max_chunks > protocol.MAX_PLACES or self.nbytes >= 1 << 47:
            raise ConfigError(
                f"{self.max_chunks} chunks of {self.max_chunk_bytes} bytes, and messages of"
                f" {self.max_message_bytes}, are beyond what one process can address"
            )

    @property
    def num_words(self) -> int:
        return protocol.num_words(self.n_reader) + 1 + self.n_reader

    @property
    def entries_at(self) -> int:
        return Words.size(self.num_words)

    @property
    def arena_at(self) -> int:
        return -(-(self.entries_at + self.max_chunks * _ENTRY_NBYTES) // _PAGE) * _PAGE

    @property
    def chunk_nbytes(self) -> int:
        """The largest message that counts as one that fits a chunk."""
        return aligned(self.max_chunk_bytes) + _MARGIN

    @property
    def large_nbytes(self) -> int:
        """Bytes for larger messages: one of the largest, with aligned tensors, or several."""
        return aligned(self.max_message_bytes + self.max_message_bytes // 64) + _MARGIN

    @property
    def arena_nbytes(self) -> int:
        nbytes = small_nbytes(self.max_chunks, self.chunk_nbytes) + self.large_nbytes
        return -(-nbytes // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        return self.arena_at + self.arena_nbytes


class ShmRingBuffer:
    """One process's mapping of the ring."""

    def __init__(self, sizes: Sizes, segment: Segment) -> None:
        self.sizes = sizes
        self.words = Words(segment, 0, sizes.num_words)
        self.arena = segment.view[sizes.arena_at :]
        """The bytes of messages, flat. Only the writer writes to it."""
        self._segment = segment
        self._entries = segment.view[sizes.entries_at : sizes.arena_at]
        self._places = sizes.max_chunks
        self._arena_nbytes = sizes.arena_nbytes

    @classmethod
    def create(cls, sizes: Sizes) -> tuple[ShmRingBuffer, int]:
        """A new ring, and the descriptor of its memory, which the caller passes on and closes.

        Raises:
            ResourceExhaustedError, TransportError: as :meth:`Segment.create`.
        """
        segment, fd = Segment.create("queue", sizes.nbytes)
        return cls(sizes, segment), fd

    @classmethod
    def attach(cls, sizes: Sizes, fd: int) -> ShmRingBuffer:
        """Map the ring of another process. The caller still owns the descriptor.

        Raises:
            WireError: it is not sealed memory of these sizes.
            ResourceExhaustedError, TransportError: it cannot be mapped.
        """
        return cls(sizes, Segment.attach(fd, sizes.nbytes))

    def close(self) -> None:
        """Release the memory, when it is not used any more. Remaining views keep it mapped."""
        for view in (self.arena, self._entries, self.words.words, self._segment.view):
            view.release()
        with contextlib.suppress(BufferError):
            self._segment.memory.close()

    def ready_word(self, reader: int | None) -> int:
        """Index of the word that is set while this end waits until all are ready; ``None``: the writer."""
        first = protocol.num_words(self.sizes.n_reader)
        return first if reader is None else first + 1 + reader

    def put(self, number: int, kind: int, at: int, head_nbytes: int, body_nbytes: int) -> None:
        """Write the entry of message ``number``, whose bytes lie at ``at`` of the arena, head first."""
        _ENTRY.pack_into(
            self._entries, number % self._places * _ENTRY_NBYTES, number, kind, at, head_nbytes, body_nbytes
        )

    def get(self, number: int) -> QueueMessage:
        """Message ``number``, which was published.

        Raises:
            WireError: its entry is invalid, or points outside the arena.
        """
        stated, kind, at, head_nbytes, body_nbytes = _ENTRY.unpack_from(
            self._entries, number % self._places * _ENTRY_NBYTES
        )
        body_at = at + aligned(head_nbytes)
        end = body_at + body_nbytes
        if stated != number or kind not in (VALUE, CHUNK) or end > self._arena_nbytes:
            raise WireError(
                f"the entry of message {number} states message {stated} of kind {kind}, at"
                f" {at} to {end} of {self._arena_nbytes} bytes"
            )
        arena = self.arena
        return QueueMessage(kind == CHUNK, arena[at : at + head_nbytes], arena[body_at:end])

    def give_back(self, at: int, nbytes: int) -> None:
        """Return these bytes of the arena to the system, where it can take them back."""
        self._segment.give_back(self.sizes.arena_at + at, nbytes)
