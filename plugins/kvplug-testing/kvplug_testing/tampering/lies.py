"""Values, and announcements of tensors, that a peer may send although they cannot be true.

Pure. A lie differs from the truth in one place, so that everything around it passes its checks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kvplug import KvplugError, UnsupportedError
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
_HUGE: Final = (2**33, 2**40, 2**50)
"""Bytes of a tensor that is only announced."""


# -- values ----------------------------------------------------------------------------------------


def lie(value: Any, rng: random.Random) -> tuple[Any, str]:
    """The value with one part of it changed, and which, in words."""
    path = rng.choice([*_paths(value)])
    false = _changed(_at(value, path), rng)
    where = "".join(f"[{step!r}]" for step in path) or "the value"
    return _replaced(value, path, false), f"{where} becomes {_short(false)}"


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value[:64]):
            yield from _paths(item, (*path, index))


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


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
    change = _CHANGES.get(type(value))
    if change is None or rng.random() < 0.1:
        return rng.choice(_TYPES)
    return change(value, rng)


def _integer(value: int, rng: random.Random) -> int:
    found = rng.choice((*INTEGERS, value + 1, value - 1, 2 * value, value ^ 1 << rng.randrange(40)))
    return found if -(2**63) <= found < 2**64 else 0


def _text(value: str, rng: random.Random) -> str:
    return rng.choice(("", value[:-1], value + "x", value + ESCAPES, ESCAPES * 20, "x" * 5000, value * 2))


def _bytes(value: bytes, rng: random.Random) -> bytes:
    found = bytearray(value)
    if found:
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return rng.choice((b"", value[:-1], value[1:], value + b"\0", value * 2, bytes(len(value)), bytes(found)))


def _items(value: Any, rng: random.Random) -> Any:
    items = [*value]
    at = rng.randrange(len(items)) if items else 0
    changed: Sequence[list[Any]] = (
        [],
        items[:at] + items[at + 1 :],
        [*items, *items],
        items[:at] + items[at : at + 1] * 2 + items[at + 1 :],
        items[::-1],
        [*items, 7],
    )
    return type(value)(rng.choice(changed))


def _mapping(value: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    keys = [*value]
    if not keys or rng.random() < 0.2:
        return {**value, "more": 7}
    left_out = rng.choice(keys)
    return {key: value[key] for key in keys if key != left_out}


_CHANGES: Final[dict[type, Callable[[Any, random.Random], Any]]] = {
    bool: lambda value, rng: not value,
    int: _integer,
    float: lambda value, rng: rng.choice((0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, -value)),
    str: _text,
    bytes: _bytes,
    list: _items,
    tuple: _items,
    dict: _mapping,
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
                end = at + size
            else:
                end = at + HEADER_SIZE + header.length
            if end <= len(data):
                yield at, end
            else:
                end = at + 1
        except KvplugError:
            pass
        at = data.find(MAGIC, end)


def false_frame(frame: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A frame of the same kind that says something else, and what, in words.

    Raises:
        UnsupportedError: this one has nothing to change.
    """
    header = decode_header(frame, max_length=2**60)
    payload = frame[HEADER_SIZE:]
    if header.kind is FrameKind.TENSOR:
        return _false_tensor(decode_meta(payload), header.flags, header.length, rng)
    if header.kind is FrameKind.VALUE and len(payload) <= _MOST_BYTES:
        value, words = lie(decode(payload), rng)
        data = encode(value)
        return encode_header(FrameKind.VALUE, len(data), header.flags) + data, words
    kind = rng.choice(tuple(FrameKind))
    return encode_header(kind, header.length, header.flags ^ rng.randrange(2)), f"it becomes a {kind.name}"


def much_larger(frame: bytes) -> bytes:
    """The frame of a tensor that announces far more than any machine has, and is right in itself."""
    header = decode_header(frame, max_length=2**60)
    meta = decode_meta(frame[HEADER_SIZE:])
    made = TensorMeta(meta.dtype, (_HUGE[-1] // meta.itemsize,))
    encoded = encode_meta(made)
    return encode_header(FrameKind.TENSOR, len(encoded) + made.nbytes, header.flags) + encoded


def _false_tensor(meta: TensorMeta, flags: int, length: int, rng: random.Random) -> tuple[bytes, str]:
    """The prefix of a tensor that contradicts nothing but the bytes that follow, or only itself."""
    shape = [*meta.shape]
    dtype = meta.dtype
    match rng.randrange(5):
        case 0:  # much more than will come
            rows = rng.choice(_HUGE) // max(1, meta.itemsize * math.prod(shape[1:]))
            shape = [max(1, rows), *shape[1:]]
        case 1:
            dtype = rng.choice(tuple(DTYPES))
        case 2:
            shape = [*shape, rng.choice((0, 1, 2, 7))]
        case 3:
            at = rng.randrange(len(shape)) if shape else 0
            shape[at : at + 1] = [rng.choice((0, 1, (shape or [1])[at] + 1))]
        case 4:
            flags ^= 1 << rng.randrange(8)
    try:
        made = TensorMeta(dtype, tuple(shape))
    except UnsupportedError:
        made = meta
    encoded = encode_meta(made)
    said = len(encoded) + made.nbytes if rng.random() < 0.9 else length
    words = f"a tensor {made.dtype} {list(made.shape)} of {said} bytes with flags {flags} is announced"
    return encode_header(FrameKind.TENSOR, said, flags) + encoded, words
