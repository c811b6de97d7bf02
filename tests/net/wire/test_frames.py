"""The 16 bytes before every message."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import WireError
from kvplug.net.wire.frames import HEADER_SIZE, MAJOR, FrameKind, decode_header, encode_header

KINDS = st.sampled_from(FrameKind)


@given(KINDS, st.integers(0, 2**64 - 1), st.integers(0, 255))
def test_a_header_comes_back_as_it_was(kind: FrameKind, length: int, flags: int) -> None:
    data = encode_header(kind, length, flags)
    assert len(data) == HEADER_SIZE == 16
    header = decode_header(data, max_length=2**64)
    assert (header.kind, header.length, header.flags) == (kind, length, flags)
    assert type(header.kind) is FrameKind


def test_the_layout_in_memory_is_the_documented_one() -> None:
    assert encode_header(FrameKind.TENSOR, 0x0102, flags=7) == b"KVPG\x01\x00\x02\x07\x02\x01\0\0\0\0\0\0"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "16 bytes"),
        (encode_header(FrameKind.NONE, 0)[:15], "16 bytes"),
        (b"HTTP" + bytes(12), "HTTP"),
        (struct.pack("<4sBBBBQ", b"KVPG", MAJOR + 1, 0, 1, 0, 0), "upgrade the older end"),
        (struct.pack("<4sBBBBQ", b"KVPG", MAJOR, 0, 200, 0, 0), "unknown frame kind 200"),
        (encode_header(FrameKind.VALUE, 1001), "1001 bytes, but at most 1000"),
    ],
)
def test_a_refusal_names_the_field_what_came_and_what_is_allowed(data: bytes, named: str) -> None:
    with pytest.raises(WireError, match=named):
        decode_header(data, max_length=1000)


def test_a_newer_minor_version_is_read_and_what_follows_the_header_is_not_looked_at() -> None:
    data = bytearray(encode_header(FrameKind.VALUE, 3) + b"\xff" * 3)
    data[5] = 9
    header = decode_header(memoryview(data), max_length=3)
    assert (header.minor, header.length) == (9, 3)
