"""Changes of a conversation between two ends, made from a recording of it. Pure.

A stream is what one end says on one connection, after both have proved themselves. Positions count its bytes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import attrs

from kvplug import KvplugError
from kvplug_testing.tampering.lies import INTEGERS, false_frame, frames_in, much_larger

EVERYTHING: Final = 1 << 62
"""The end of an edit that takes all that follows."""
_HEAD: Final = 64
"""Bytes at the beginning of what is sent at once, where headers are."""


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
        self._held = b""
        self.is_cut = False

    def feed(self, data: bytes) -> bytes:
        """What to pass on now."""
        edit = self._edit
        if edit is None or self.is_cut:
            return b"" if self.is_cut else data
        before = data[: max(0, edit.begin - self._at)] if self._at < edit.begin else b""
        self._at += len(data)
        if self._at < edit.begin or (self._at == edit.begin and edit.end > edit.begin):
            return data
        self._held += data[len(before) :]
        if edit.cuts:
            self.is_cut = True
            return before
        length = edit.end - edit.begin
        if len(self._held) < length:
            return before
        held, self._held, self._edit = self._held, b"", None
        return before + edit.change(held[:length]) + held[length:]

    def rest(self) -> bytes:
        """What was held back for an edit whose end never came."""
        held, self._held, self._edit = self._held, b"", None
        return held


def edits_of(recording: Recording, rng: random.Random, *, forward: bool) -> Iterator[Edit]:
    """Changes of what the one end said, random ones without end; none if it said nothing."""
    streams = [
        stream for stream, sent in recording.items() if stream.forward is forward and any(map(len, sent))
    ]
    for stream in streams:
        yield from _sure_edits(stream, b"".join(recording[stream]))
    while streams:
        stream = rng.choice(streams)
        try:
            yield _edit(stream, [part for part in recording[stream] if part], rng)
        except KvplugError:
            continue  # a lie that cannot be encoded


def _sure_edits(stream: StreamId, whole: bytes) -> Iterator[Edit]:
    """What is tried in any case: far more is announced than comes, and nothing comes from some place on."""
    for begin, end in frames_in(whole):
        with contextlib.suppress(KvplugError):
            yield Edit(
                stream,
                begin,
                end,
                _becoming(much_larger(whole[begin:end])),
                "far more is announced than comes",
            )
            break
    at = len(whole) // 2
    yield Edit(stream, at, EVERYTHING, bytes, "nothing more comes", cuts=True)


def _becoming(data: bytes) -> Callable[[bytes], bytes]:
    """Whatever came there this time."""
    return lambda _: data


def _edit(stream: StreamId, sent: Sequence[bytes], rng: random.Random) -> Edit:
    whole = b"".join(sent)
    found = [*frames_in(whole)]
    if found and rng.random() < 0.4:
        begin, end = rng.choice(found)
        data, words = false_frame(whole[begin:end], rng)
        return Edit(stream, begin, end, _becoming(data), words)
    begins = [0, *accumulate(map(len, sent))]
    match rng.randrange(8):
        case 0 | 1:
            return _flip(stream, _place(begins, rng), rng)
        case 2 | 3:
            return _number(stream, _place(begins, rng), rng)
        case 4:
            at = _place(begins, rng)
            return Edit(stream, at, EVERYTHING, bytes, "nothing more comes", cuts=True)
        case 5:
            begin, end = rng.choice([*pairwise(begins)])
            return Edit(stream, begin, end, lambda data: data + data, f"{end - begin} bytes come twice")
        case 6:
            begin, end = rng.choice([*pairwise(begins)])
            return Edit(stream, begin, end, lambda data: b"", f"{end - begin} bytes do not come")
        case _:
            return _swap(stream, begins, rng)


def _place(begins: Sequence[int], rng: random.Random) -> int:
    """A position, more often in the beginning of what was sent at once."""
    begin, end = rng.choice([*pairwise(begins)])
    return rng.randrange(begin, min(end, begin + _HEAD) if rng.random() < 0.8 else end)


def _flip(stream: StreamId, at: int, rng: random.Random) -> Edit:
    bit = rng.randrange(8)
    return Edit(stream, at, at + 1, lambda data: bytes([data[0] ^ 1 << bit]), f"bit {bit} flips")


def _number(stream: StreamId, at: int, rng: random.Random) -> Edit:
    size = rng.choice((1, 2, 4, 8))
    order: Any = rng.choice(("little", "big"))
    number = rng.choice((*INTEGERS, 2**64 - 1)) % (1 << 8 * size)
    data = number.to_bytes(size, order)
    return Edit(stream, at, at + size, _becoming(data), f"{size} bytes become {number}, {order}-endian")


def _swap(stream: StreamId, begins: Sequence[int], rng: random.Random) -> Edit:
    parts = [*zip(begins, begins[1:], begins[2:], strict=False)]
    if not parts:
        return _flip(stream, _place(begins, rng), rng)
    begin, middle, end = rng.choice(parts)
    size = middle - begin
    words = f"{size} bytes come after the {end - middle} that follow them"
    return Edit(stream, begin, end, lambda data: data[size:] + data[:size], words)
