"""The most that a message within the limits can become in memory."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvplug.net.wire.tensors import TensorMeta, encode_meta
from kvplug.net.wire.validate import Limits
from kvplug.net.wire.values import aligned, decode, decode_out_of_band, encode

LIMITS = Limits(max_bytes=64 << 10, max_depth=16, max_items=4096)


def ext(code: int, payload: bytes) -> bytes:
    return struct.pack(">BIB", 0xC9, len(payload), code) + payload


MARK = b"\xc7\x00"


def apart(code: int, dtype: str, *shape: int) -> bytes:
    return ext(code, encode_meta(TensorMeta(dtype, shape)))


def at_most(read: Callable[[], Any], nbytes: int) -> Any:
    """What ``read`` returns, with no more memory in use at any time than ``nbytes`` may take."""
    gc.collect()
    tracemalloc.start()
    try:
        value = read()
        assert tracemalloc.get_traced_memory()[1] <= LIMITS.memory_bound(nbytes)
    finally:
        tracemalloc.stop()
    return value


def apart_dense(element: bytes, nbytes: int) -> tuple[bytes, int]:
    """As many leaves as the bound of bytes allows, and what their memories take."""
    count = min(LIMITS.max_items, (LIMITS.max_bytes - 16) // (len(element) + nbytes))
    return b"\xdd" + count.to_bytes(4, "big") + element * count, count * aligned(nbytes)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("uint8", ()),
        ("uint8", (0,)),
        ("float64", ()),
        ("uint8", (0, *(1,) * 62)),
        ("uint8", (0, *(300,) * 6)),
    ],
    ids=str,
)
def test_the_most_that_a_head_of_arrays_can_become_is_within_the_bound(
    dtype: str, shape: tuple[int, ...]
) -> None:
    np = pytest.importorskip("numpy")
    head, nbytes = apart_dense(apart(18, dtype, *shape), TensorMeta(dtype, shape).nbytes)
    memories = memoryview(bytes(nbytes))
    value = at_most(lambda: decode_out_of_band(head, memories, limits=LIMITS), len(head) + nbytes)
    assert type(value[-1]) is np.ndarray and value[-1].shape == shape


DENSE = {
    "nothing but nil": (b"\xdc\x0f\xff", b"\xc0"),
    "empty lists": (b"\xdc\x0f\xff", b"\x90"),
    "empty tuples": (b"\xdc\x07\xff", b"\x91" + MARK + b"\x01"),
    "empty tagged dicts": (b"\xdc\x07\xff", b"\x91" + MARK + b"\x04"),
    "dicts of one": (b"\xdc\x05\x55", b"\x81\xc0\xc0"),
    "tagged dicts of one": (b"\xdc\x03\xff", b"\x93" + MARK + b"\x04\xc0\xc0"),
    "two-byte texts": (b"\xdc\x0f\xff", b"\xa2\xc3\xa9"),
    "dicts within dicts": (b"\xdc\x00\x80", b"\x81\xc0" * 14 + b"\x80"),
}


@pytest.mark.parametrize(("head", "element"), DENSE.values(), ids=DENSE)
def test_the_most_that_a_message_can_become_is_within_the_bound(head: bytes, element: bytes) -> None:
    count = int.from_bytes(head[1:], "big")
    data = head + element * count
    assert len(at_most(lambda: decode(data, limits=LIMITS), len(data))) == count


def test_text_that_grows_when_decoded_is_within_the_bound() -> None:
    text = encode("a" * 50_000 + "\U0001f600")  # one wide character makes all of them wide
    at_most(lambda: decode(text, limits=LIMITS), len(text))
