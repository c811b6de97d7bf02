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
            size = edit.end - edit.begin
            return before + edit.change(held[:size]) + held[size:]
        return before

    def rest(self) -> bytes:
        """What was held back for an edit whose end never came."""
        return self._held


def edits_of(recording: Recording, rng: random.Random, *, forward: bool) -> Iterator[Edit]:
    """Changes of what the one end said, random ones without end; none if it said nothing.

    In any case these: far more is announced than comes, and nothing comes from some place on.
    """
    streams = {
        stream: b"".join(sent)
        for stream, sent in recording.items()
        if stream.forward is forward and any(map(len, sent))
    }
    for stream, whole in streams.items():
        for begin, end in frames_in(whole):
            with contextlib.suppress(KvplugError):
                data = much_larger(whole[begin:end])
                yield Edit(stream, begin, end, _becoming(data), "far more is announced than comes")
                break
        yield _cut(stream, len(whole) // 2)
    while streams:
        stream = rng.choice([*streams])
        with contextlib.suppress(KvplugError):  # a lie that cannot be encoded
            yield _edit(stream, [part for part in recording[stream] if part], streams[stream], rng)


def _becoming(data: bytes) -> Callable[[bytes], bytes]:
    """Whatever came there this time."""
    return lambda _: data


def _cut(stream: StreamId, at: int) -> Edit:
    return Edit(stream, at, EVERYTHING, bytes, "nothing more comes", cuts=True)


def _edit(stream: StreamId, sent: Sequence[bytes], whole: bytes, rng: random.Random) -> Edit:
    frames = [*frames_in(whole)]
    if frames and rng.random() < 0.4:
        begin, end = rng.choice(frames)
        data, words = false_frame(whole[begin:end], rng)
        return Edit(stream, begin, end, _becoming(data), words)
    begin, end = rng.choice([*pairwise([0, *accumulate(map(len, sent))])])
    at = rng.randrange(begin, min(end, begin + _HEAD) if rng.random() < 0.8 else end)
    match rng.randrange(8):
        case 0 | 1:
            bit = 1 << rng.randrange(8)
            return Edit(stream, at, at + 1, lambda data: bytes([data[0] ^ bit]), f"a bit flips: {bit}")
        case 2 | 3 | 4:
            size = rng.choice((1, 2, 4, 8))
            order: Any = rng.choice(("little", "big"))
            number = rng.choice(INTEGERS) % (1 << 8 * size)
            words = f"{size} bytes become {number}, {order}-endian"
            return Edit(stream, at, at + size, _becoming(number.to_bytes(size, order)), words)
        case 5:
            return _cut(stream, at)
        case 6:
            return Edit(stream, begin, end, lambda data: data + data, f"{end - begin} bytes come twice")
    return Edit(stream, begin, end, lambda data: b"", f"{end - begin} bytes do not come")
