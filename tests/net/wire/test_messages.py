"""What a pipe puts before a tensor's bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import WireError
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, encode_header
from kvplug.net.wire.messages import (
    GOODBYE,
    MAX_LENGTH,
    NONE,
    SHORTEST_TENSOR_PREFIX,
    prefix_size,
    read_prefix,
    tensor_prefix,
)
from kvplug.net.wire.tensors import TensorMeta, encode_meta


def prefix_of(dtype: str, shape: tuple[int, ...], flags: int = 0) -> bytes:
    stands_for_one: Any = f"torch.{dtype}"
    size: Any = shape
    return tensor_prefix(stands_for_one, size, TensorMeta(dtype, shape).nbytes, flags)


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1,) * 64])
@pytest.mark.parametrize("flags", [0, 1, 255])
def test_a_prefix_states_what_it_was_made_of(shape: tuple[int, ...], flags: int) -> None:
    prefix = prefix_of("bfloat16", shape, flags)
    assert prefix_size(b"") == prefix_size(prefix[:15]) == HEADER_SIZE
    assert prefix_size(prefix[:HEADER_SIZE]) == SHORTEST_TENSOR_PREFIX
    assert prefix_size(prefix[:SHORTEST_TENSOR_PREFIX]) == len(prefix)
    announcement = read_prefix(prefix)
    assert announcement.meta == TensorMeta("bfloat16", shape)
    assert announcement.flags == flags
    assert not announcement.goodbye


def test_none_and_goodbye_are_headers() -> None:
    for data, goodbye in ((NONE, False), (GOODBYE, True)):
        assert prefix_size(data) == prefix_size(data + b"\0\0") == HEADER_SIZE == len(data)
        announcement = read_prefix(data)
        assert announcement.meta is None
        assert announcement.goodbye is goodbye
        assert read_prefix(data[:7] + b"\x07" + data[8:]).flags == 7


def test_an_invalid_message_of_a_pipe_is_refused() -> None:
    for data in (
        b"\0" * 18,
        encode_header(FrameKind.VALUE, 3) + b"abc",
        encode_header(FrameKind.TENSOR, MAX_LENGTH + 1) + b"\2\0",
        encode_header(FrameKind.TENSOR, 3) + b"\2\xff",
        encode_header(FrameKind.TENSOR, 3) + b"\xff\1",
    ):
        with pytest.raises(WireError):
            prefix_size(data)
    for data in (b"", b"KVPG"):
        with pytest.raises(WireError):
            read_prefix(data)


def test_a_length_that_contradicts_the_meta_is_refused() -> None:
    meta = encode_meta(TensorMeta("int32", (5,)))
    for length in (0, len(meta), len(meta) + 19, len(meta) + 21):
        with pytest.raises(WireError, match="a tensor of 20 bytes in a frame of"):
            read_prefix(encode_header(FrameKind.TENSOR, length) + meta)
    for kind in (FrameKind.NONE, FrameKind.GOODBYE):
        with pytest.raises(WireError, match="no payload"):
            read_prefix(encode_header(kind, 1))


@given(st.binary(max_size=40) | st.binary(max_size=24).map(lambda rest: b"KVPG\1\0\2\0" + rest))
def test_no_bytes_do_more_than_raise_a_wire_error(data: bytes) -> None:
    for read in (prefix_size, read_prefix):
        with contextlib.suppress(WireError):
            read(data)
