"""Changes of what a peer sends, made from a recording of it: values, frames, bytes that cannot be true. Pure.

A lie differs from the truth in one place, so that everything around it passes its checks. A stream is what
one end sends on one connection, after both have proved themselves. Positions count its bytes.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import attrs

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
            return _cut_or_longer(value, rng)
        case dict() if value:
            left_out = rng.choice([*value, None])
            more = {"more": 7} if left_out is None else {}
            return {key: value[key] for key in value if key != left_out} | more
    return rng.choice(_TYPES)


def _cut_or_longer(value: Any, rng: random.Random) -> Any:
    """Another text or list: a part of it is missing, twice there, or too much."""
    at = rng.randrange(len(value) or 1)
    more: dict[type, Any] = {str: ESCAPES, bytes: bytes(5000), list: [7], tuple: (7,)}
    longer = value + more[type(value)]
    return rng.choice((value[:at], value[:at] + value[at + 1 :], 2 * value, value[::-1], longer))


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
        KvplugError: the frame has no value, or the new value cannot be encoded.
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


# -- changes of a conversation ------------------------------------------------------------


EVERYTHING: Final = 1 << 62
"""The end of an edit that takes all that follows."""
_HEAD: Final = 64
"""Bytes at the beginning of what is sent at once, where headers are."""
_SHORT: Final = 1 << 12
"""Bytes of what may be no more than headers and values."""


class StreamId(NamedTuple):
    """One direction of one connection."""

    connection: int
    """In the order in which they were made."""
    forward: bool
    """From the end that dialled to the one that listens."""


Recording = Mapping[StreamId, Sequence[bytes]]
"""What was sent at once, one after the other."""


@attrs.frozen
class Edit:
    """One change: the bytes from ``begin`` to ``end`` of a stream become other ones."""

    stream: StreamId
    begin: int
    end: int
    change: Callable[[bytes], bytes] = attrs.field(repr=False)
    """May raise a ``KvplugError``: these bytes cannot be changed."""
    words: str
    """What it does, for reports."""
    cuts: bool = False
    """Nothing follows: the connection ends there."""

    def __str__(self) -> str:
        who = "the end that dials" if self.stream.forward else "the end that listens"
        return f"{who}, connection {self.stream.connection}, byte {self.begin}: {self.words}"


class StreamEditor:
    """Applies an edit to the bytes of its stream, as they come."""

    def __init__(self, edit: Edit | None) -> None:
        self._edit = edit
        self._at = 0
        """Where ``_held`` begins."""
        self._held = b""
        """Bytes that wait for the end of the edit."""
        self.is_cut = False

    def feed(self, data: bytes) -> bytes:
        """What to pass on now."""
        edit = self._edit
        if edit is None:
            return data
        self._held += data
        before = self._held[: max(0, edit.begin - self._at)]
        self._held, self._at = self._held[len(before) :], self._at + len(before)
        if edit.cuts and self._at == edit.begin:
            self.is_cut, self._held = True, b""
        elif self._held and len(self._held) >= edit.end - edit.begin:
            held, self._held, self._edit = self._held, b"", None
            return before + _applied(edit, held)
        return before

    def rest(self) -> bytes:
        """What was held back for an edit whose end never came."""
        return self._held


def _applied(edit: Edit, data: bytes) -> bytes:
    size = edit.end - edit.begin
    try:
        return edit.change(data[:size]) + data[size:]
    except KvplugError:
        return data


def edits_of(recording: Recording, rng: random.Random) -> Iterator[Edit]:
    """An endless series of random changes of what the ends sent; empty if they sent nothing."""
    frames = [(stream, *place) for stream, sent in recording.items() for place in frames_in(b"".join(sent))]
    parts = {stream: pairwise(accumulate(map(len, sent), initial=0)) for stream, sent in recording.items()}
    sent = [(stream, *place) for stream, places in parts.items() for place in places]
    short = [(stream, begin, end) for stream, begin, end in sent if end - begin <= _SHORT]
    while sent:
        if frames and rng.random() < 0.5:
            yield _false(*rng.choice(frames), rng)
        else:
            yield _edit(*rng.choice(short if short and rng.random() < 0.8 else sent), rng)


def _false(stream: StreamId, begin: int, end: int, rng: random.Random) -> Edit:
    seed = rng.getrandbits(32)
    return Edit(stream, begin, end, partial(false_frame, seed=seed), f"a false frame of the seed {seed}")


def _edit(stream: StreamId, begin: int, end: int, rng: random.Random) -> Edit:
    at = rng.randrange(begin, min(end, begin + _HEAD) if rng.random() < 0.8 else end)
    match rng.randrange(6):
        case 0 | 1:
            return Edit(stream, at, EVERYTHING, bytes, "nothing more comes", cuts=True)
        case 2:
            times, words = rng.choice(((0, "do not come"), (2, "come twice")))
            return Edit(stream, begin, end, lambda data: times * data, f"{end - begin} bytes {words}")
    size = rng.choice((1, 2, 4, 8))
    order: Any = rng.choice(("little", "big"))
    number = (rng.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, order)
    return Edit(stream, at, at + size, lambda _: number, f"{size} bytes become {number.hex()}")
