"""Values, and frames with them or with announcements of tensors, that a peer may send although they cannot be
true.

Pure. A lie differs from the truth in one place, so that everything around it passes its checks.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvplug import KvplugError
from kvplug.kit import DTYPES, MAGIC, prefix_size
from kvplug.net.wire import (
    HEADER_SIZE,
    FrameKind,
    TensorMeta,
    decode,
    decode_header,
    decode_meta,
    encode,
    encode_header,
    encode_meta,
)

Path = tuple[Any, ...]
"""Keys and indices that lead to a part of a value."""

INTEGERS: Final = (0, 1, -1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**40, 2**62, 2**63 - 1)
ESCAPES: Final = "no room\n\x1b[2J\x1b]0;root\x07"
_TYPES: Final[tuple[Any, ...]] = (None, True, 7, -0.5, "text", b"bytes", [], {}, [1, [2]], {"a": None})
_HUGE: Final = 2**47
"""Elements of a tensor that is only announced: more than any machine has memory for."""
_MOST_WITH_BYTES: Final = 1 << 12
"""Bytes of the frame of a tensor that is small."""


def lie(value: Any, rng: random.Random) -> Any:
    """The value with one part of it changed."""
    path = rng.choice([*_paths(value)])
    part = value
    for step in path:
        part = part[step]
    return _replaced(value, path, _changed(part, rng))


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value[:64]):
            yield from _paths(item, (*path, index))


def _replaced(value: Any, path: Path, part: Any) -> Any:
    if not path:
        return part
    step, *rest = path
    if isinstance(value, dict):
        return {**value, step: _replaced(value[step], tuple(rest), part)}
    items = [*value]
    items[step] = _replaced(items[step], tuple(rest), part)
    return type(value)(items)


def _changed(value: Any, rng: random.Random) -> Any:
    """Another value of the same type; now and then one of another type."""
    if rng.random() < 0.1:
        return rng.choice(_TYPES)
    match value:
        case bool():
            return not value
        case int():
            found = rng.choice((*INTEGERS, value + 1, value - 1, 2 * value))
            return found if -(2**63) <= found < 2**64 else 0
        case float():
            return rng.choice((0.0, -1.0, math.nan, math.inf, 1e300, -value))
        case str() | bytes() | list() | tuple():
            at = rng.randrange(len(value) + 1)
            more = {str: ESCAPES, bytes: bytes(5000)}.get(type(value)) or type(value)([7])
            return rng.choice(
                (value[:at], value[:at] + value[at + 1 :], 2 * value, value[::-1], value + more)
            )
        case dict() if value:
            left_out = rng.choice([*value, None])
            more = {"more": 7} if left_out is None else {}
            return {key: value[key] for key in value if key != left_out} | more
    return rng.choice(_TYPES)


# -- frames ------------------------------------------------------------------------------------------


def frames_in(data: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of each frame of kvplug's wire format in these bytes: of a large tensor only the
    announcement.
    """
    at = data.find(MAGIC)
    while at >= 0:
        end = at + 1
        with contextlib.suppress(KvplugError):
            size = _frame_size(data[at : at + _MOST_WITH_BYTES])
            if at + size <= len(data):
                end = at + size
                yield at, end
        at = data.find(MAGIC, end)


def _frame_size(data: bytes) -> int:
    header = decode_header(data[:HEADER_SIZE], max_length=2**60)
    whole = HEADER_SIZE + header.length
    if header.kind is not FrameKind.TENSOR:
        return whole
    announced = prefix_size(data[: HEADER_SIZE + 2])
    decode_meta(data[HEADER_SIZE:announced])
    return whole if whole <= _MOST_WITH_BYTES else announced


def with_value(frame: bytes, change: Callable[[Any], Any]) -> bytes:
    """The frame with another value in it, or in its tensor.

    Raises:
        KvplugError: there is none, or the other one cannot be encoded.
    """
    header = decode_header(frame[:HEADER_SIZE], max_length=2**60)
    is_value = header.kind is FrameKind.VALUE
    begin = HEADER_SIZE if is_value else prefix_size(frame[: HEADER_SIZE + 2])
    data = encode(change(decode(frame[begin:])))
    if is_value:
        return encode_header(FrameKind.VALUE, len(data), header.flags) + data
    return _announced(TensorMeta("uint8", (len(data),)), header.flags) + data


def false_frame(frame: bytes, seed: int) -> bytes:
    """A frame with another content: often another value, if there is one.

    Raises:
        KvplugError: the content cannot be encoded.
    """
    rng = random.Random(seed)
    if rng.random() < 0.7:
        with contextlib.suppress(KvplugError):
            return with_value(frame, lambda value: lie(value, rng))
    header = decode_header(frame[:HEADER_SIZE], max_length=2**60)
    if header.kind is not FrameKind.TENSOR:
        return encode_header(rng.choice(tuple(FrameKind)), header.length, header.flags ^ rng.randrange(2))
    end = prefix_size(frame[: HEADER_SIZE + 2])
    meta = decode_meta(frame[HEADER_SIZE:end])
    shape = rng.choice(([], [0], [_HUGE], [2**33, *meta.shape], [1, *meta.shape], meta.shape[1:]))
    made = TensorMeta(rng.choice((meta.dtype, *DTYPES)), tuple(shape))
    return _announced(made, header.flags ^ rng.choice((0, 1 << rng.randrange(8)))) + frame[end:]


def _announced(meta: TensorMeta, flags: int) -> bytes:
    encoded = encode_meta(meta)
    return encode_header(FrameKind.TENSOR, len(encoded) + meta.nbytes, flags) + encoded
