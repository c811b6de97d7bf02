"""Integrity: a fast hash of the gathered bytes, checked in the memory that received them.

It finds corruption (a flipped bit, a truncated or misplaced part); the chance that it misses one is 1 in
2**64. It does not prove who sent the bytes: a process that can change them can also hash them. The handshake
proves the sender.

The digest of several buffers is the digest of their concatenated bytes. The boundaries between the buffers
are not hashed, so the ends must agree on shapes separately. xxhash releases the interpreter's lock for large
buffers, so hashing in one thread does not stop the others.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from kvplug.errors import UnsupportedError

Buffer = bytes | bytearray | memoryview

NAMES: Final = ("xxh3_64", "xxh3_128")
"""All names, in order of preference. ``xxh3_64``: 8 bytes, big-endian, seed 0."""


def available() -> tuple[str, ...]:
    """Return the hashes that this process can compute, preferred first; empty if xxhash is not installed."""
    return NAMES if importlib.util.find_spec("xxhash") is not None else ()


def digest(name: str, *buffers: Buffer) -> bytes:
    """Return the hash of the buffers' concatenated bytes.

    >>> digest("xxh3_64", b"key", b"value").hex()
    'a986367d94cda23c'
    >>> digest("xxh3_64", b"keyvalue") == digest("xxh3_64", b"key", b"value")
    True

    Args:
        buffers: C-contiguous buffers of any format; nothing is copied.

    Raises:
        UnsupportedError: the name is unknown, or xxhash is not installed.
        BufferError: a buffer is not contiguous.
    """
    if name not in NAMES:
        raise UnsupportedError(f"unknown checksum {name!r}; known are {', '.join(NAMES)}")
    try:
        import xxhash
    except ImportError as e:
        raise UnsupportedError(f"checksum {name!r} needs the package xxhash: {e}") from e
    state = xxhash.xxh3_64() if name == "xxh3_64" else xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()
