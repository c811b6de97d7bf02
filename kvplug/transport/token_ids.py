"""Token ids as bytes."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from kvplug.errors import WireError


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as int64, little-endian.

    An int64 buffer (an array, a numpy array, a memoryview) is taken over as a whole.

    >>> pack_tokens([1, 258]).hex()
    '01000000000000000201000000000000'

    Raises:
        TypeError: not integers, or bytes.
        OverflowError: more than 64 bits.
    """
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        found = token_ids if isinstance(token_ids, tuple | list) else [*token_ids]
        try:
            return struct.pack(f"<{len(found)}q", *found)  # several times as fast as an array
        except struct.error:
            packed = array("q", found)  # which says what is wrong
    else:
        if view.format in ("c", "b", "B"):
            raise TypeError("token ids are integers of 64 bits, and bytes were given")
        whole = view.format in ("q", "l") and view.itemsize == 8
        packed = array("q", view.tobytes() if whole else view.tolist())
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> Sequence[int]:
    """The inverse of :func:`pack_tokens`: a read-only sequence of ints (a memoryview where possible).

    >>> list(unpack_tokens(pack_tokens([1, 258])))
    [1, 258]

    Raises:
        WireError: not a whole number of ids.
    """
    if len(packed) % 8:
        raise WireError(f"token ids take 8 bytes each, and {len(packed)} is no multiple of that")
    if sys.byteorder == "little":
        return memoryview(packed).cast("q")
    swapped = array("q", packed)
    swapped.byteswap()
    return tuple(swapped)
