"""The structure of a msgpack message, checked before anything is built from it.

A msgpack decoder trusts a length before it has seen the elements, and accepts extensions that kvplug does not
use. :func:`validate` reads the bytes once, without recursion and without building anything; only bytes that
pass reach the decoder.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import attrs

from kvplug.errors import WireError


@attrs.frozen(kw_only=True)
class Limits:
    """How much one message may make its receiver hold. The sender checks them too."""

    max_bytes: int = 16 << 20
    """Of the encoded message."""
    max_depth: int = 32
    """Containers within containers."""
    max_items: int = 1 << 20
    """Elements of all containers together; a pair of a dict counts as two."""

    def memory_bound(self, nbytes: int) -> int:
        """What decoding a message of ``nbytes`` may allocate at most, in bytes.

        A copy of the message, the leaves' own bytes, and :data:`ITEM_COST` for each element, of which
        there are no more than bytes.
        """
        nbytes = min(nbytes, self.max_bytes)
        return FIXED_COST + 6 * nbytes + ITEM_COST * min(nbytes, self.max_items)


ITEM_COST: Final = 192
"""Bytes of Python objects that one element can become: a dict of one pair takes 240 and is two elements, an
empty set takes 310 while its mark is resolved and is two elements, an empty dict takes 72 and is one."""
FIXED_COST: Final = 1 << 16
"""Bytes for what does not grow with the message: exceptions, the decoder's own state."""

DEFAULT_LIMITS: Final = Limits()
"""What readers accept where a call names no other limits."""


class Mark(enum.IntEnum):
    """First element of an array that is not a list. Extension types without payload."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DICT = 4
    """Key, value, key, value, … of a dict with keys other than None, bool, int, float, str, bytes."""


class Leaf(enum.IntEnum):
    """Extension types with a payload."""

    DTYPE = 16
    """One byte, the code of a torch dtype."""
    TENSOR = 17
    """A tensor's meta and bytes."""
    ARRAY = 18
    """The same of a numpy array."""
    TENSOR_OUT_OF_BAND = 19
    """A tensor's meta; its bytes are out of band. Only in a head, see :mod:`kvplug.net.wire.values`."""
    ARRAY_OUT_OF_BAND = 20
    """The same of a numpy array."""


MARKS = {int(mark): mark for mark in Mark}
_OUT_OF_BAND = frozenset((int(Leaf.TENSOR_OUT_OF_BAND), int(Leaf.ARRAY_OUT_OF_BAND)))
_LEAVES = frozenset(int(leaf) for leaf in Leaf) - _OUT_OF_BAND
_MARK_SIZE = 3
"""Bytes of a mark: ext8, length 0, code."""


def _fixed_sizes() -> bytes:
    """For each first byte the size of an element whose size it fixes, 0 for the others."""
    sizes = bytearray(256)
    sizes[0x00:0x80] = b"\x01" * 128  # positive fixint
    sizes[0xE0:0x100] = b"\x01" * 32  # negative fixint
    sizes[0xA0:0xC0] = bytes(range(1, 33))  # fixstr
    for first, size in {
        0xC0: 1, 0xC2: 1, 0xC3: 1,  # nil, false, true
        0xCA: 5, 0xCB: 9,  # float32, float64
        0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9,  # uint, int
    }.items():  # fmt: skip
        sizes[first] = size
    return bytes(sizes)


_FIXED = _fixed_sizes()
_U8, _U16, _U32 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
_TEXT_LENGTH = {0xC4: _U8, 0xC5: _U16, 0xC6: _U32, 0xD9: _U8, 0xDA: _U16, 0xDB: _U32}
_ARRAY_LENGTH = {0xDC: _U16, 0xDD: _U32}
_MAP_LENGTH = {0xDE: _U16, 0xDF: _U32}
_EXT_LENGTH = {0xC7: _U8, 0xC8: _U16, 0xC9: _U32}
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def validate(data: bytes, limits: Limits, out_of_band: list[slice] | None = None) -> bool:
    """Check the structure of one msgpack value without building it; whether there are marks in it.

    Bytes that pass have no length beyond their end, no foreign extension, no container as the key of a map,
    and no nesting beyond the limit. Leaves whose bytes are out of band are accepted only if ``out_of_band``
    is given; their metas' places are appended to it, in order.
    """
    end = len(data)
    pos = 0
    left = 1  # elements still to come in the container at hand
    in_map = False
    outer: list[tuple[int, bool]] = []  # the containers around it
    items = limits.max_items
    marked = False
    try:
        while True:
            while left:
                first = data[pos]
                size = _FIXED[first]
                if size:
                    pos += size
                    left -= 1
                    continue
                left -= 1
                if first in _TEXT_LENGTH:
                    length = _TEXT_LENGTH[first]
                    pos += 1 + length.size + length.unpack_from(data, pos + 1)[0]
                    continue
                if in_map and left % 2:
                    raise WireError(f"a container or extension is a map's key, at byte {pos}")
                is_map = False
                if 0x90 <= first < 0xA0:
                    count = first & 0x0F
                    pos += 1
                elif 0x80 <= first < 0x90:
                    count, is_map = 2 * (first & 0x0F), True
                    pos += 1
                elif first in _ARRAY_LENGTH:
                    length = _ARRAY_LENGTH[first]
                    count = length.unpack_from(data, pos + 1)[0]
                    pos += 1 + length.size
                elif first in _MAP_LENGTH:
                    length = _MAP_LENGTH[first]
                    count, is_map = 2 * length.unpack_from(data, pos + 1)[0], True
                    pos += 1 + length.size
                else:
                    pos = _validate_leaf(data, pos, end, out_of_band)
                    continue
                if count > end - pos:
                    raise WireError(f"a container claims {count} elements, and {end - pos} bytes are left")
                items -= count
                if items < 0:
                    raise WireError(f"more than {limits.max_items} elements")
                if len(outer) >= limits.max_depth:
                    raise WireError(f"nested more than {limits.max_depth} deep")
                outer.append((left, in_map))
                left, in_map = count, is_map
                if count and not is_map and data.startswith(b"\xc7\x00", pos):
                    code = data[pos + 2]
                    if code not in MARKS:
                        raise WireError(f"unknown extension {code} without payload, at byte {pos}")
                    if code == Mark.DICT and count % 2 == 0:
                        raise WireError(f"a dict with a key and no value, at byte {pos}")
                    marked = True
                    pos += _MARK_SIZE
                    left -= 1
            if not outer:
                break
            left, in_map = outer.pop()
    except (IndexError, struct.error) as e:
        raise WireError(f"a value is cut short after {end} bytes") from e
    if pos != end:
        what = f"is cut short after {end} bytes" if pos > end else f"is followed by {end - pos} bytes"
        raise WireError(f"a value {what}")
    return marked


def _validate_leaf(data: bytes, pos: int, end: int, out_of_band: list[slice] | None) -> int:
    """Where the extension at ``pos`` ends, if it is one with a payload we know."""
    first = data[pos]
    if first in _FIXEXT:
        size, at = _FIXEXT[first], pos + 1
    elif first in _EXT_LENGTH:
        length = _EXT_LENGTH[first]
        size, at = length.unpack_from(data, pos + 1)[0], pos + 1 + length.size
    else:
        raise WireError(f"byte {first:#04x} starts no value, at byte {pos}")
    code = data[at]
    known = code in _LEAVES or (out_of_band is not None and code in _OUT_OF_BAND)
    if not known or size == 0:
        raise WireError(f"extension {code} is not accepted here, at byte {pos}")
    if size > end - at - 1:
        raise WireError(f"an extension claims {size} bytes, and {end - at - 1} are left")
    if code == Leaf.DTYPE and size != 1:
        raise WireError(f"a dtype is one byte, not {size}")
    if out_of_band is not None and code in _OUT_OF_BAND:
        out_of_band.append(slice(at + 1, at + 1 + size))
    return int(at + 1 + size)
