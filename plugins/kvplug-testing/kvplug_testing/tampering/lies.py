"""Values, and announcements of tensors, that a peer may send although they cannot be true.

Pure. A lie differs from the truth in one place, so that everything around it passes its checks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
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
_MOST_BYTES: Final = 1 << 20
_HUGE: Final = 2**50
"""Bytes of a tensor that is only announced."""


def lie(value: Any, rng: random.Random) -> tuple[Any, str]:
    """The value with one part of it changed, and a description of the change."""
    path = rng.choice([*_paths(value)])
    part = value
    for step in path:
        part = part[step]
    false = _changed(part, rng)
    where = "".join(f"[{step!r}]" for step in path) or "the value"
    return _replaced(value, path, false), f"{where} becomes {false!r:.60}"


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
        case str():
            return rng.choice(("", value[:-1], value + ESCAPES, "x" * 5000))
        case bytes():
            at = rng.randrange(len(value) + 1)
            flipped = value[:at] + bytes(each ^ 1 << rng.randrange(8) for each in value[at : at + 1])
            return rng.choice((b"", value[:-1], value + b"\0", bytes(len(value)), flipped + value[at + 1 :]))
        case list() | tuple():
            items = [*value]
            at = rng.randrange(len(items) + 1)
            changed = rng.choice(([], items[:at] + items[at + 1 :], items + items, items[::-1], [*items, 7]))
            return type(value)(changed)
        case dict() if value:
            left_out = rng.choice([*value, None])
            more = {"more": 7} if left_out is None else {}
            return {key: value[key] for key in value if key != left_out} | more
    return rng.choice(_TYPES)


# -- frames and announcements ------------------------------------------------------------------------


def frames_in(data: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of what is a frame of kvplug's wire format in these bytes: of a tensor only the prefix."""
    at = data.find(MAGIC)
    while at >= 0:
        end = at + 1
        try:
            header = decode_header(data[at : at + HEADER_SIZE], max_length=2**60)
            if header.kind is FrameKind.TENSOR:
                size = prefix_size(data[at : at + HEADER_SIZE + 2])
                decode_meta(data[at + HEADER_SIZE : at + size])
            else:
                size = HEADER_SIZE + header.length
            if at + size <= len(data):
                end = at + size
                yield at, end
        except KvplugError:
            pass
        at = data.find(MAGIC, end)


def false_frame(frame: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A frame of the same kind with another content, and a description of the change.

    Raises:
        KvplugError: this one has nothing to change.
    """
    header = decode_header(frame, max_length=2**60)
    payload = frame[HEADER_SIZE:]
    if header.kind is FrameKind.TENSOR:
        meta = decode_meta(payload)
        shape = rng.choice(([], [0], [2**33, *meta.shape], [1, *meta.shape], meta.shape[1:]))
        made = TensorMeta(rng.choice((meta.dtype, *DTYPES)), tuple(shape))
        flags = header.flags ^ rng.choice((0, 1 << rng.randrange(8)))
        return _announced(made, flags), f"{made} with flags {flags} is announced"
    if header.kind is FrameKind.VALUE and len(payload) <= _MOST_BYTES:
        value, words = lie(decode(payload), rng)
        data = encode(value)
        return encode_header(FrameKind.VALUE, len(data), header.flags) + data, words
    kind = rng.choice(tuple(FrameKind))
    return encode_header(kind, header.length, header.flags ^ rng.randrange(2)), f"it becomes a {kind.name}"


def much_larger(frame: bytes) -> bytes:
    """The frame of a tensor that announces far more than any machine has, and is right in itself.

    Raises:
        KvplugError: the frame is not that of a tensor.
    """
    header = decode_header(frame, max_length=2**60)
    meta = decode_meta(frame[HEADER_SIZE:])
    return _announced(TensorMeta(meta.dtype, (_HUGE // meta.itemsize,)), header.flags)


def _announced(meta: TensorMeta, flags: int) -> bytes:
    encoded = encode_meta(meta)
    return encode_header(FrameKind.TENSOR, len(encoded) + meta.nbytes, flags) + encoded
