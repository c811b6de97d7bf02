"""Hashes of what was moved."""

from __future__ import annotations

import struct
import sys
from array import array

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import UnsupportedError
from kvplug.net.wire.checksum import NAMES, available, digest


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        # from the specification's reference implementation (xxhsum -H3, -H2)
        ("xxh3_64", b"", "2d06800538d394c2"),
        ("xxh3_64", b"abc", "78af5f94892f3950"),
        ("xxh3_128", b"", "99aa06d3014798d86001c324468d497f"),
        ("xxh3_128", b"abc", "06b05ab6733a618578af5f94892f3950"),
    ],
)
def test_digests_are_those_of_the_reference_implementation(name: str, data: bytes, expected: str) -> None:
    assert digest(name, data).hex() == expected


def test_buffers_of_every_kind_are_hashed_without_a_copy() -> None:
    numbers = array("q", [1, 2, 3])
    raw = struct.pack("=3q", 1, 2, 3)
    assert digest("xxh3_64", memoryview(numbers)) == digest("xxh3_64", raw)
    assert digest("xxh3_64", bytearray(raw)) == digest("xxh3_64", raw)
    assert digest("xxh3_64", memoryview(raw).cast("B", (3, 8))) == digest("xxh3_64", raw)


@given(data=st.binary(min_size=1, max_size=2000), at=st.data(), name=st.sampled_from(NAMES))
def test_one_flipped_bit_is_found(data: bytes, at: st.DataObject, name: str) -> None:
    bit = at.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert digest(name, data) != digest(name, flipped)


def test_without_xxhash_nothing_is_available_and_a_digest_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert available() == NAMES == ("xxh3_64", "xxh3_128")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert available() == ()
    with pytest.raises(UnsupportedError, match="package xxhash"):
        digest("xxh3_64", b"")
