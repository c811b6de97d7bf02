"""Whether the file of a shared library is complete.

The loader maps the file without reading it, and reading a missing part is a SIGBUS.
"""

from __future__ import annotations

import struct
from typing import Final

_HEADER: Final = struct.Struct("<16s2HI3QI6H")  # Elf64_Ehdr
_SEGMENT: Final = struct.Struct("<2I6Q")  # Elf64_Phdr
_64_BITS_LITTLE: Final = b"\x7fELF\x02\x01"


def missing_bytes(path: str) -> int:
    """Return how many bytes of the library's segments lie behind the end of its file.

    0 if it is not a 64-bit library: the loader raises an error for that.

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
