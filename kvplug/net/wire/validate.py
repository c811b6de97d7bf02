"""Checks the structure of a msgpack message before anything is built from it.

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
from kvplug.net.wire.tensors import META_PREFIX_SIZE, TensorMeta, decode_meta, meta_size


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds on the memory that one message may make its receiver use. The sender checks them too."""

    max_bytes: int = 16 << 20
    """Size of the encoded message."""
    max_depth: int = 32
    """Containers within containers."""
    max_items: int = 1 << 20
    """Elements of all containers together; a dict's pair counts as two."""

    def memory_bound(self, nbytes: int) -> int:
        """Return the most bytes that decoding a message of ``nbytes`` may allocate.

        The bound covers a copy of the message, the leaves' own bytes, and :data:`ITEM_COST` for each element.
        A message has no more elements than bytes.
        """
        nbytes = min(nbytes, self.max_bytes)
        return FIXED_COST + 6 * nbytes + ITEM_COST * min(nbytes, self.max_items)


ITEM_COST: Final = 192
"""Bytes of Python objects that one element can become: a dict of one pair takes 240 and is two elements, an
empty set takes 310 while its mark is resolved and is two elements, an empty dict takes 72 and is one."""
FIXED_COST: Final = 1 << 16
"""Bytes that do not grow with the message: exceptions, the decoder's own state."""

DEFAULT_LIMITS: Final = Limits()
"""The limits of a call that is given no others."""


class Mark(enum.IntEnum):
    """Extension types without payload: the first element of an array that does not encode a list."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DICT = 4
    """A dict with a key other than None, bool, int, float, str or bytes, as key, value, key, value, …"""


class Leaf(enum.IntEnum):
    """Extension types with a payload."""

    DTYPE = 16
    """One byte, the code of a torch dtype."""
    TENSOR = 17
    """A tensor's meta, and its bytes unless these are out of band; see
    :mod:`kvplug.net.wire.values`."""
    ARRAY = 18
    """The same for a numpy array."""


MARKS: Final = {int(mark): mark for mark in Mark}
_LEAVES: Final = frozenset(map(int, Leaf))
_EMPTY_EXTENSION: Final = b"\xc7\x00"
"""The first bytes of a mark; its code follows."""

# -- the first byte of an element ------------------------------------------------------------------

_SIZES: Final = bytearray(256)
"""Size of an element by its first byte; 0 if the first byte does not determine the size."""
_SIZES[0x00:0x80] = b"\x01" * 128  # positive fixint
_SIZES[0xE0:0x100] = b"\x01" * 32  # negative fixint
_SIZES[0xA0:0xC0] = bytes(range(1, 33))  # fixstr
for _first, _size in {
    0xC0: 1, 0xC2: 1, 0xC3: 1,  # nil, false, true
    0xCA: 5, 0xCB: 9,  # float32, float64
    0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9,  # uint, int
}.items():  # fmt: skip
    _SIZES[_first] = _size

_TEXT, _ARRAY, _MAP, _EXTENSION = range(4)
_U8, _U16, _U32 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
_HEADS: Final[dict[int, tuple[int, int, struct.Struct | None]]] = {
    **{0x90 + count: (_ARRAY, count, None) for count in range(16)},
    **{0x80 + count: (_MAP, count, None) for count in range(16)},
    **{0xD4 + power: (_EXTENSION, 1 << power, None) for power in range(5)},
    0xC4: (_TEXT, 0, _U8), 0xC5: (_TEXT, 0, _U16), 0xC6: (_TEXT, 0, _U32),
    0xD9: (_TEXT, 0, _U8), 0xDA: (_TEXT, 0, _U16), 0xDB: (_TEXT, 0, _U32),
    0xDC: (_ARRAY, 0, _U16), 0xDD: (_ARRAY, 0, _U32),
    0xDE: (_MAP, 0, _U16), 0xDF: (_MAP, 0, _U32),
    0xC7: (_EXTENSION, 0, _U8), 0xC8: (_EXTENSION, 0, _U16), 0xC9: (_EXTENSION, 0, _U32),
}  # fmt: skip
"""For the other first bytes: the kind of element, its number of bytes or elements, and the format of that
number if it follows the first byte."""


def validate(data: bytes, limits: Limits, out_of_band: list[TensorMeta] | None = None) -> bool:
    """Check the structure of one msgpack value without building it. Returns whether it contains marks.

    Bytes that pass have no length beyond their end, no foreign extension, no container as the key of a map,
    and no nesting beyond the limit. The metas of leaves without bytes are appended to ``out_of_band`` if it
    is given; otherwise the decoder rejects such leaves.
    """
    end = len(data)
    pos = 0
    left = 1  # elements still to come in the current container
    in_map = False
    outer: list[tuple[int, bool]] = []  # the containers around the current one
    items = limits.max_items
    is_marked = False
    try:
        while left or outer:
            if not left:
                left, in_map = outer.pop()
                continue
            left -= 1
            if size := _SIZES[data[pos]]:
                pos += size
                continue
            begin = pos
            kind, count, number = _HEADS[data[pos]]
            pos += 1
            if number is not None:
                count = number.unpack_from(data, pos)[0]
                pos += number.size
            if kind == _TEXT:
                pos += count
                continue
            if in_map and left % 2:
                raise WireError(f"a map's key is a container or extension, at byte {begin}")
            if kind == _EXTENSION:
                code, begin, pos = data[pos], pos + 1, pos + 1 + count
                if code not in _LEAVES or count == 0:
                    raise WireError(f"extension {code} is not accepted here, before byte {begin}")
                if pos > end:
                    raise WireError(f"an extension claims {count} bytes, but {end - begin} are left")
                if code == Leaf.DTYPE:
                    if count != 1:
                        raise WireError(f"a dtype takes one byte, not {count}")
                elif out_of_band is not None and count <= meta_size(data[begin : begin + META_PREFIX_SIZE]):
                    out_of_band.append(decode_meta(data[begin:pos]))
                continue
            if kind == _MAP:
                count *= 2
            if count > end - pos:
                raise WireError(f"a container claims {count} elements, but {end - pos} bytes are left")
            items -= count
            if items < 0:
                raise WireError(f"a value has more than {limits.max_items} elements")
            if len(outer) >= limits.max_depth:
                raise WireError(f"a value is nested more than {limits.max_depth} deep")
            outer.append((left, in_map))
            left, in_map = count, kind == _MAP
            if count and not in_map and data.startswith(_EMPTY_EXTENSION, pos):
                code = data[pos + 2]
                if code not in MARKS:
                    raise WireError(f"unknown extension {code} without payload, at byte {pos}")
                if code == Mark.DICT and count % 2 == 0:
                    raise WireError(f"a dict has a key without a value, at byte {pos}")
                is_marked = True
                pos += 3
                left -= 1
    except KeyError as e:
        raise WireError(f"byte {data[pos]:#04x} cannot start a value, at byte {pos}") from e
    except (IndexError, struct.error) as e:
        raise WireError(f"a value is cut short after {end} bytes") from e
    if pos != end:
        what = f"is cut short after {end} bytes" if pos > end else f"is followed by {end - pos} bytes"
        raise WireError(f"a value {what}")
    return is_marked
