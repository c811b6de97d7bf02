"""Token ids as bytes."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import WireError
from kvplug.net.wire.token_ids import pack_tokens, unpack_tokens


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive_as_bytes(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert list(unpack_tokens(packed)) == token_ids
    assert packed == b"".join(token.to_bytes(4, "little", signed=True) for token in token_ids)


def test_buffers_of_integers_are_packed_by_value_whatever_their_width() -> None:
    for code in "hilq":
        assert list(unpack_tokens(pack_tokens(array(code, [1, 2, 300])))) == [1, 2, 300]
    assert list(unpack_tokens(pack_tokens(memoryview(array("q", range(6)))[::2]))) == [0, 2, 4]


@pytest.mark.parametrize(
    "token_ids", [b"\x01\x02", bytearray(8), memoryview(b"12345678"), [1.0], ["1"], [None]]
)
def test_what_are_no_token_ids_is_refused(token_ids: Any) -> None:
    with pytest.raises(TypeError):
        pack_tokens(token_ids)


def test_bytes_that_are_no_whole_number_of_token_ids_are_refused() -> None:
    with pytest.raises(WireError, match="4 bytes each"):
        unpack_tokens(b"1234567")
