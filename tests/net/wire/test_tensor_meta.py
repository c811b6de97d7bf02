"""What a tensor's bytes mean, without torch."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import UnsupportedError, WireError
from kvplug.net.wire.tensors import DTYPES, META_PREFIX_SIZE, TensorMeta, decode_meta, encode_meta, meta_size

METAS = st.builds(
    TensorMeta,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 3), max_size=30).map(tuple)
    | st.lists(st.integers(0, 2**19), max_size=3).map(tuple),
)


@given(METAS)
def test_a_meta_comes_back_as_it_was(meta: TensorMeta) -> None:
    data = encode_meta(meta)
    assert decode_meta(data) == meta
    assert meta_size(data[:META_PREFIX_SIZE]) == len(data) == 2 + 8 * len(meta.shape)
    assert meta.nbytes == math.prod(meta.shape) * meta.itemsize


@pytest.mark.parametrize("shape", [(2**62,), (2**40, 2**40), (0, 2**40, 2**40), (2**63,), (2**64 - 1, 0)])
def test_a_size_beyond_63_bits_is_refused_at_both_ends(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="bytes"):
        TensorMeta("float32", shape)
    with pytest.raises(WireError, match="out of bounds"):
        decode_meta(struct.pack(f"<BB{len(shape)}Q", 12, len(shape), *shape))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "cut short"),
        (b"\x0c", "cut short"),
        (b"\x0c\x01" + bytes(7), "cut short"),
        (b"\x0c\x00x", "1 bytes follow"),
        (b"\x00\x00", "unknown dtype code 0"),
        (b"\x0c\x41", "65 dimensions"),
    ],
)
def test_a_refusal_states_what_is_wrong(data: bytes, named: str) -> None:
    with pytest.raises(WireError, match=named):
        decode_meta(data)
