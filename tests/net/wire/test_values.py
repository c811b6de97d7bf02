"""Plain values: exact types there and back, bounds before belief. Without torch and numpy."""

from __future__ import annotations

import enum
import struct
import tracemalloc
from collections import namedtuple
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvplug.errors import CapacityError, UnsupportedError, WireError
from kvplug.net.wire.validate import Limits
from kvplug.net.wire.values import decode, encode

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
HASHABLE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=6,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4)
    ),
    max_leaves=25,
)


def exactly(value: Any) -> Any:
    """Something that is equal for two values only if types, order and bits are."""
    kind = type(value)
    if kind is float:
        return "float", struct.pack("<d", value)
    if kind is list or kind is tuple:
        return kind.__name__, [exactly(item) for item in value]
    if kind is set or kind is frozenset:
        return kind.__name__, sorted((exactly(item) for item in value), key=repr)
    if kind is dict:
        return "dict", [(exactly(key), exactly(item)) for key, item in value.items()]
    return kind.__name__, value


@given(VALUES)
def test_a_value_comes_back_with_its_exact_types_order_and_bits(value: Any) -> None:
    assert exactly(decode(encode(value))) == exactly(value)


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "path", "named"),
    [
        (object(), "value:", "object"),
        (2**64, "value:", "65 bits"),
        ([1, (2, {"k": 1j})], r"value\[1\]\[1\]\['k'\]:", "complex"),
        ({"a": {1, (object,)}}, r"value\['a'\], member of type tuple\[0\]:", "type"),
        ({(1, len): 2}, r"value, key of type tuple\[1\]:", "builtin_function_or_method"),
        (Colour.RED, "value:", "Colour"),
        ([Word("x")], r"value\[0\]:", "Word"),
        (Point(1, 2), "value:", "Point"),
        (bytearray(b"x"), "value:", "bytearray"),
        (["\ud800"], r"value\[0\]:", "surrogate"),
        (msgspec.msgpack.Ext(1, b""), "value:", "Ext"),
    ],
    ids=lambda v: None if isinstance(v, str) else type(v).__name__,
)
def test_what_is_not_carried_is_refused_by_path_and_type(value: Any, path: str, named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{path}.*{named}") as refusal:
        encode(value)
    assert isinstance(refusal.value, TypeError)


def nested(depth: int) -> Any:
    value: Any = 1
    for i in range(depth):
        value = (value,) if i % 2 else {"k": value}
    return value


def test_the_sender_keeps_the_bounds_that_the_receiver_checks() -> None:
    limits = Limits(max_bytes=100, max_depth=5, max_items=20)
    for fits in (nested(5), [0] * 20, tuple([0] * 19), {i: i for i in range(10)}, b"x" * 98):
        assert decode(encode(fits, limits=limits), limits=limits) == fits
    many = {i: i for i in range(11)}
    for too_much in (nested(6), [0] * 21, (0,) * 20, many, b"x" * 99, [[0] * 10, [0] * 10]):
        with pytest.raises(CapacityError):
            encode(too_much, limits=limits)
        with pytest.raises(WireError):
            decode(encode(too_much), limits=limits)


# -- hostile bytes ---------------------------------------------------------------------------------

FIRST_LIES = {
    "array32": b"\xdd\xff\xff\xff\xff",
    "array16": b"\xdc\xff\xff",
    "map32": b"\xdf\xff\xff\xff\xff",
    "map16": b"\xde\xff\xff",
    "bin32": b"\xc6\xff\xff\xff\xff",
    "str32": b"\xdb\xff\xff\xff\xff",
    "ext32": b"\xc9\xff\xff\xff\xff\x11",
    "array in array": b"\x91" * 20 + b"\xdd\x7f\xff\xff\xff",
    "a map of maps": b"\xdf\x40\x00\x00\x00\x00" * 3,
}


@pytest.mark.parametrize("data", FIRST_LIES.values(), ids=FIRST_LIES)
def test_a_length_that_the_bytes_do_not_keep_allocates_nothing(data: bytes) -> None:
    with pytest.raises(WireError):  # once outside, for what is cached
        decode(data)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 10


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "cut short"),
        (b"\x01\x02", "followed by 1 bytes"),
        (b"\xc1", "0xc1"),
        (b"\xa1\xff", "do not encode a value"),
        (b"\x91" * 33 + b"\xc0", "nested more than 32"),
        (b"\xd6\xff\x00\x00\x00\x00", "extension 255"),  # msgpack's own timestamp
        (b"\xc7\x00\x01", "extension 1 "),  # a mark on its own
        (b"\x91\xc7\x00\x09", "unknown extension 9"),
        (b"\xc7\x00\x11", "extension 17"),  # a tensor of no bytes at all
        (b"\x81\x90\xc0", "map's key"),
        (b"\x92\xc7\x00\x04\xc0", "a key without a value"),
        (b"\x92\xc7\x00\x02\x90", "cannot be hashed"),  # a set of a list
        (b"\x93\xc7\x00\x04\x80\xc0", "cannot be hashed"),  # a dict with a dict as key
        (b"\x93\xc7\x00\x02\x01\x01", "a member twice"),
        (b"\xc7\x02\x10\x0c\x0c", "one byte, not 2"),
        (b"\xd4\x10\x00", "unknown dtype code 0"),
        (b"\xd4\x11\x0c", "cut short"),
        (b"\xd5\x11\x0c\xff", "255 dimensions"),
        (b"\xc7\x0e\x11" + struct.pack("<BBQ", 12, 1, 1 << 40) + bytes(4), "not 4"),
        # msgspec 0.19 hands out a view whose slices go further than its bytes: 8 are claimed, 4 are its own.
        (b"\x92\xc7\x0e\x11" + struct.pack("<BBQ", 12, 1, 2) + bytes(4) + b"\xc4\x04abcd", "not 4"),
    ],
    ids=lambda v: v[:8].hex() if isinstance(v, bytes) else None,
)
def test_bytes_that_are_no_value_are_refused_by_what_is_wrong(data: bytes, named: str) -> None:
    with pytest.raises(WireError, match=named):
        decode(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    try:
        value = decode(data)
    except WireError:
        return
    try:
        again = encode(value)
    except TypeError:  # a tensor or such, where those are installed
        return
    assert exactly(decode(again)) == exactly(value)
