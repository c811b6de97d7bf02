"""The values that hold a page: their names, their sizes, and their cost in the server's memory.

A page has one value under its own name, its *manifest*. It begins with the head below. A small page follows
the head. A larger one lies in pieces, whose names contain the checksum of the page's bytes; the manifest is
written last. So two writers of one page, whose bits may differ, do not mix.

=========  =====  ================================================================
field      bytes  content
=========  =====  ================================================================
magic      4      ``kvr1``
in pieces  4      0: the page follows, 1: it is in pieces
tag        8      xxh3_64 of the page, or of its header if that has digests of the page
length     8      of the page, little-endian, as all numbers here
piece      8      bytes of each piece but the last; 0 without pieces
=========  =====  ================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import xxhash

from kvplug.transport import PageSeal, WireError

LAYOUT: Final = 2
"""Version of the names and values. Part of every name, so that a page of another version is a miss."""
_MAGIC: Final = b"kvr1"
_HEAD: Final = struct.Struct("<4sI8sQQ")
HEAD_BYTES: Final = _HEAD.size
MIN_PIECE_BYTES: Final = 4096
MAX_PIECES: Final = 1 << 16
_PER_VALUE: Final = 224
"""Bytes that the server needs for a key besides its value: a name of about 130 bytes, table entries."""
_PER_PAGE: Final = 512
"""Bytes of a page's records for the budget: one entry of a sorted set, one of a hash."""


@attrs.frozen
class Head:
    """The beginning of a manifest."""

    tag: bytes
    length: int
    piece: int
    """0: the page follows."""

    def to_bytes(self) -> bytes:
        return _HEAD.pack(_MAGIC, int(self.piece > 0), self.tag, self.length, self.piece)

    @classmethod
    def from_bytes(cls, value: bytes | memoryview) -> Head:
        """Raises WireError: the value begins with something else."""
        if len(value) < HEAD_BYTES:
            raise WireError("a value is not a manifest")
        magic, in_pieces, tag, length, piece = _HEAD.unpack_from(value)
        if magic != _MAGIC or in_pieces != int(piece > 0):
            raise WireError("a value is not a manifest")
        if piece and (piece < MIN_PIECE_BYTES or length > piece * MAX_PIECES):
            raise WireError("a manifest states more pieces than a page has")
        return cls(tag, length, piece)

    @property
    def num_pieces(self) -> int:
        return -(-self.length // self.piece) if self.piece else 0

    @property
    def cost(self) -> int:
        """Bytes of the server's memory for the page."""
        if not self.piece:
            return _allocated(HEAD_BYTES + self.length) + _PER_VALUE + _PER_PAGE
        whole, rest = divmod(self.length, self.piece)
        values = whole * _allocated(self.piece) + (_allocated(rest) if rest else 0) + _allocated(HEAD_BYTES)
        return values + (self.num_pieces + 1) * _PER_VALUE + _PER_PAGE


class Names:
    """Names of the keys of one prefix."""

    def __init__(self, prefix: str) -> None:
        self.every = f"{prefix}:{LAYOUT}:*"
        """A pattern of all names but those of the budget."""
        self.manifests = f"{prefix}:{LAYOUT}:m:*"
        self._manifest = f"{prefix}:{LAYOUT}:m:".encode()
        self._piece = f"{prefix}:{LAYOUT}:p:".encode()
        # In a cluster the text in braces determines the node: one for these, one for all values of a page.
        budget = (f"{{{prefix}:{LAYOUT}}}:{what}" for what in ("use", "cost", "total", "doomed"))
        self.budget = [name.encode() for name in budget]

    def manifest(self, key: bytes) -> bytes:
        return self._manifest + b"{%b}" % key.hex().encode()

    def key_of(self, manifest: bytes) -> bytes | None:
        """The inverse; ``None`` if it is not the name of a manifest."""
        try:
            return bytes.fromhex(manifest.removeprefix(self._manifest).decode("ascii").strip("{}"))
        except ValueError:
            return None

    def pieces(self, key: bytes, tag: bytes, count: int) -> list[bytes]:
        begin = self._piece + f"{{{key.hex()}}}:{tag.hex()}:".encode()
        return [begin + b"%d" % number for number in range(count)]


def tag_of(page: Sequence[memoryview]) -> bytes:
    """A checksum of a page, whose first part may be its header."""
    made = xxhash.xxh3_64()
    for part in page[:1] if page and PageSeal.has_digests(page[0]) else page:
        made.update(part)
    return made.digest()


def cut(parts: Sequence[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """Split the parts' concatenated bytes into groups of ``nbytes``; the last one may be shorter."""
    group: list[memoryview] = []
    room = nbytes
    for part in parts:
        left = part.cast("B")
        while left:
            taken, left = left[:room], left[room:]
            group.append(taken)
            room -= len(taken)
            if not room:
                yield group
                group, room = [], nbytes
    if group:
        yield group


def _allocated(nbytes: int) -> int:
    """Bytes that jemalloc allocates for a value: four sizes per doubling (its manual, "size classes")."""
    nbytes += 24  # the value's own header and end
    if nbytes <= 128:
        return -(-nbytes // 16) * 16
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
