"""Changes of a conversation between two ends, made from a recording of it. Pure.

A stream is what one end says on one connection, after both have proved themselves. Positions count its bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import attrs

from kvplug import KvplugError
from kvplug_testing.tampering.lies import INTEGERS, false_frame, frames_in

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
            return before + _changed(edit, held)
        return before

    def rest(self) -> bytes:
        """What was held back for an edit whose end never came."""
        return self._held


def _changed(edit: Edit, data: bytes) -> bytes:
    size = edit.end - edit.begin
    try:
        return edit.change(data[:size]) + data[size:]
    except KvplugError:
        return data


def edits_of(recording: Recording, rng: random.Random) -> Iterator[Edit]:
    """Changes of what the ends said, random ones without end; none if they said nothing."""
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
