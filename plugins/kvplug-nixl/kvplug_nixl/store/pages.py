"""The content of an object: a page between a head and a tail that belong together."""

from __future__ import annotations

import secrets
import struct
from typing import Final

import attrs

from kvplug.transport import WireError

_MAGIC: Final = b"kvplugNX"
_HEAD: Final = struct.Struct("<8sB7xQ8s")
HEAD_BYTES: Final = _HEAD.size
TAIL_BYTES: Final = 8
_PAGE, _REMOVED = 1, 2


@attrs.frozen
class Head:
    """The beginning of an object. An object that is cut off lacks its tail, which repeats the tag."""

    length: int
    """Length of the page in bytes."""
    tag: bytes = attrs.field(factory=lambda: secrets.token_bytes(TAIL_BYTES))
    """Differs from write to write."""
    is_removed: bool = False
    """Whether the page was removed. NIXL cannot delete objects: the store overwrites one with this."""

    def to_bytes(self) -> bytes:
        return _HEAD.pack(_MAGIC, _REMOVED if self.is_removed else _PAGE, self.length, self.tag)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Head:
        """Raises WireError: the data is not a head, or one of a later version."""
        magic, kind, length, tag = _HEAD.unpack(data)
        if magic != _MAGIC or kind not in (_PAGE, _REMOVED):
            raise WireError("an object is not a page of kvplug")
        return cls(length, tag, kind == _REMOVED)
