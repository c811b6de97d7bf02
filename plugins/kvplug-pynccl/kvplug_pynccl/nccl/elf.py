"""Whether a shared library is complete: the loader maps it unread, and reading a missing part is a SIGBUS."""

from __future__ import annotations

import struct
from typing import Final

_HEADER: Final = struct.Struct("<16s2HI3QI6H")  # Elf64_Ehdr
_SEGMENT: Final = struct.Struct("<2I6Q")  # Elf64_Phdr
_64_BITS_LITTLE: Final = b"\x7fELF\x02\x01"


def missing_bytes(path: str) -> int:
    """How many bytes of its segments lie behind the file's end.

    0, too, if it is not a 64-bit library: the loader raises an error for that.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_64_BITS_LITTLE):
            return 0
        _, _, _, _, _, at, _, _, _, step, count, *_ = _HEADER.unpack(header)
        file.seek(at)
        table = file.read(step * count)
        size = file.seek(0, 2)
    if step < _SEGMENT.size or len(table) < step * count:
        return max(0, int(at + step * count) - size)
    end = 0
    for place in range(0, len(table), step):
        _, _, offset, _, _, length, _, _ = _SEGMENT.unpack_from(table, place)
        end = max(end, int(offset + length))
    return max(0, end - size)
