"""Values with memories apart, as far as that goes without torch and numpy."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import WireError
from kvplug.net.wire.copying import LOCK_FREE_BYTES, copy_bytes
from kvplug.net.wire.values import OutOfBand, decode_out_of_band, encode, encode_out_of_band

NOTHING = memoryview(b"")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text("aé") | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text("abc", max_size=3) | st.tuples(st.integers(0, 9)), inner, max_size=4)
        | st.frozensets(st.binary(max_size=3), max_size=1)  # at most one element: sets have no order
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_a_value_without_tensors_is_its_encoding_and_no_memory(value: Any) -> None:
    parted = encode_out_of_band(value)
    assert parted == OutOfBand(encode(value), []) and parted.nbytes == 0
    for wrap in (bytes, bytearray, memoryview):
        found = decode_out_of_band(wrap(parted.head), NOTHING)
        assert found == value and encode(found) == encode(value)


# -- hostile heads and memories --------------------------------------------------------------------


def meta(code: int, *shape: int) -> bytes:
    return struct.pack(f"<BB{len(shape)}Q", code, len(shape), *shape)


def leaf(code: int, payload: bytes) -> bytes:
    return bytes([0xC7, len(payload), code]) + payload


FLOAT32, BFLOAT16 = 12, 11
TWO = b"\x92" + leaf(17, meta(FLOAT32, 3)) + leaf(18, meta(FLOAT32, 17))
"""A list of a tensor of 12 bytes and an array of 68, which take 64 and 128."""


@pytest.mark.parametrize(
    ("head", "nbytes", "named"),
    [
        (TWO, 0, "the value's 2 memories take 192 bytes, but 0 came"),
        (TWO, 191, "but 191 came"),
        (TWO, 193, "but 193 came"),
        (encode([1]), 64, "the value's 0 memories take 0 bytes, but 64 came"),
        (leaf(17, meta(FLOAT32, 1 << 40)), 64, "have 4398046511104 bytes, but at most"),
        (leaf(17, meta(FLOAT32, 1 << 61)), 64, "out of bounds"),
        (b"\x92" + leaf(17, meta(FLOAT32, 1 << 60)) * 2, 64, "9223372036854775808 bytes, but at most"),
        (leaf(17, meta(FLOAT32, 1)[:-1]), 64, "cut short"),
        (leaf(17, b""), 64, "extension 17 is not accepted here"),
        (leaf(21, meta(FLOAT32, 1)), 64, "extension 21 is not accepted here"),
        (b"\x81" + leaf(17, meta(FLOAT32, 1)) + b"\xc0", 64, "map's key"),
        (b"\xc7\xff\x11" + meta(FLOAT32, 1), 64, "claims 255 bytes"),
        (TWO + b"\xc0", 192, "followed by 1 bytes"),
        (TWO[:-1], 192, "an extension claims"),
        (leaf(18, meta(BFLOAT16, 1)), 64, "numpy has no dtype bfloat16"),
    ],
    ids=lambda v: v[:6].hex() if isinstance(v, bytes) else None,
)
def test_a_head_and_memories_that_do_not_fit_are_refused_before_anything_is_made(
    head: bytes, nbytes: int, named: str
) -> None:
    with pytest.raises(WireError, match=named):
        decode_out_of_band(head, memoryview(bytes(nbytes)), make=lambda meta: pytest.fail(f"{meta} was made"))


# -- copying ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 100, LOCK_FREE_BYTES - 1, LOCK_FREE_BYTES, LOCK_FREE_BYTES + 1])
def test_bytes_are_copied_from_read_only_memory_to_exactly_where_they_belong(nbytes: int) -> None:
    source = bytes(i % 251 for i in range(997)) * (nbytes // 997 + 2)
    target = bytearray(nbytes + 20)
    copy_bytes(memoryview(target)[7 : 7 + nbytes], memoryview(source)[3 : 3 + nbytes])
    assert target == bytes(7) + source[3 : 3 + nbytes] + bytes(13)
