"""Token ids as bytes."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import Final

from kvplug.errors import WireError

TOKEN_BYTES: Final = 4


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian int32. ``token_ids``: an iterable, or a buffer (an array, a numpy
    array).

    No vocabulary needs more than 32 bits, and longer ids would make headers and the input of hashes longer.

    >>> pack_tokens([1, 258]).hex()
    '0100000002010000'

    Raises:
        TypeError: ``token_ids`` is bytes, or does not hold integers.
        OverflowError: a token id has more than 32 bits.
    """
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        found = token_ids if isinstance(token_ids, tuple | list) else [*token_ids]
    else:
        if view.format in ("c", "b", "B"):
            raise TypeError("token ids must be integers of 32 bits, but bytes were given")
        found = view.tolist()
    try:
        return struct.pack(f"<{len(found)}i", *found)  # several times faster than an array
    except struct.error:
        try:
            return array("i", found).tobytes()  # its error says what is wrong
        except OverflowError as e:
            raise OverflowError(f"token ids must be integers of 32 bits: {e}") from e


def unpack_tokens(packed: bytes) -> memoryview[int]:
    """Invert :func:`pack_tokens`. Returns a read-only view of ints.

    >>> list(unpack_tokens(pack_tokens([1, 258])))
    [1, 258]

    Raises:
        WireError: ``packed`` does not hold a whole number of ids.
    """
    if len(packed) % TOKEN_BYTES:
        raise WireError(
            f"token ids take {TOKEN_BYTES} bytes each, but {len(packed)} is not a multiple of {TOKEN_BYTES}"
        )
    return memoryview(packed).cast("i")
