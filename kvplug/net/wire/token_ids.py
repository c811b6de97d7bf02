"""Token ids as bytes."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvplug.errors import WireError

TOKEN_BYTES: Final = 4


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as int32, little-endian, from a sequence or a buffer of them (an array, a numpy array).

    No vocabulary is larger, and headers and hashes are as long as their token ids are.

    >>> pack_tokens([1, 258]).hex()
    '0100000002010000'

    Raises:
        TypeError: not integers, or bytes.
        OverflowError: more than 32 bits.
    """
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        found = token_ids if isinstance(token_ids, tuple | list) else [*token_ids]
    else:
        if view.format in ("c", "b", "B"):
            raise TypeError("token ids are integers of 32 bits, and bytes were given")
        found = view.tolist()
    try:
        return struct.pack(f"<{len(found)}i", *found)  # several times as fast as an array
    except struct.error:
        try:
            return array("i", found).tobytes()  # which says what is wrong
        except OverflowError as e:
            raise OverflowError(f"token ids are integers of 32 bits: {e}") from e


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """The inverse of :func:`pack_tokens`: a read-only sequence of ints (a memoryview where possible).

    >>> list(unpack_tokens(pack_tokens([1, 258])))
    [1, 258]

    Raises:
        WireError: not a whole number of ids.
    """
    if len(packed) % TOKEN_BYTES:
        raise WireError(f"token ids take {TOKEN_BYTES} bytes each, and {len(packed)} is no multiple of that")
    if sys.byteorder == "little":
        return memoryview(packed).cast("i")
    swapped = array("i", packed)
    swapped.byteswap()
    return tuple(swapped)
