"""The messages between a store and the processes that use it over a link, and their bounds.

Over the channel: plain dicts. A request has an ``op`` and an ``id``, its answers have the same ``id``; a
message without an id has no answer. Pages move beside it:

- *mapped*: the store tells where the pages are, the other process copies them out of the shared memory, and
  says when it is done. The store's part is one lookup.
- over the pipe: the store sends pieces of pages, or receives whole pages. Before each message of bytes comes
  a *tag*: the id of the request, which piece it is, how many rows and how many bytes each.

What is received is checked here, before memory is asked for. A message that breaks the rules ends the link.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import attrs

from kvplug.transport import PageFormat, Presence, PutReason, Usage, WireError, peer_text

if TYPE_CHECKING:
    from torch import Tensor

VERSION: Final = 2
STORE: Final = "host"
PIPE: Final = "pages"
"""The label of the pipe."""
MEMORY_PURPOSE: Final = "kvplug-host memory"
"""What a connection over which memory is handed out is for."""
TICKET_BYTES: Final = 16
WELCOME: Final = b"K"
"""What a reader gets that showed a ticket."""
ANSWER: Final = struct.Struct("<IQ")
"""With a descriptor: the number of the segment, and its bytes; 0 bytes and no descriptor: it cannot be
had."""
KEY_BYTES: Final = 32
MAX_KEYS: Final = 1 << 16
"""In one request."""
MAX_LISTED: Final = 1 << 17
"""In one part of a list of all keys."""
MAX_IDENTITIES: Final = 8 << 20
"""Bytes of all identities in one request."""
MAX_CHECKSUMS: Final = 1 << 16
"""Parts in all layers of a page."""
MAX_PIECES: Final = 1 << 16
"""Of one request."""
MAX_PAGE: Final = 1 << 46
"""Bytes of a page. A page that no store can hold may be asked for."""
MAX_SHARD: Final = 4096
MAX_FOR_S: Final = 1e8

T = TypeVar("T")


def most_reserved(budget_bytes: int) -> int:
    """Bytes of pages that one process may have asked to put and not sent, or those of one page."""
    return budget_bytes // 4


class Op:
    """What a message asks for: plain strings, which channels carry."""

    LOOKUP: Final = "lookup"
    READ: Final = "read"
    """Where pages are, which are leased to the reader until ``DONE``."""
    DONE: Final = "done"
    """A read has ended."""
    SEGMENT: Final = "segment"
    """Hand out a segment of the memory."""
    FETCH: Final = "fetch"
    """Send pages over the pipe."""
    CANCEL: Final = "cancel"
    """Send no more of a fetch."""
    PUT: Final = "put"
    """Slots for pages that come over the pipe."""
    REMOVE: Final = "remove"
    DECLARE: Final = "declare"
    WITHDRAW: Final = "withdraw"
    RELEASE: Final = "release"
    TOUCH: Final = "touch"
    EXPECT: Final = "expect"
    """Another end is going to read these pages."""
    WRONG: Final = "wrong"
    """A page that was read is wrong."""
    KEYS: Final = "keys"
    SUBSCRIBE: Final = "subscribe"
    UNSUBSCRIBE: Final = "unsubscribe"
    USAGE: Final = "usage"


def check_hello(hello: Any, peer: object) -> None:
    """The first message is that of a store of this version. Raises WireError."""
    if not isinstance(hello, dict) or hello.get("store") != STORE:
        raise WireError(f"{peer} serves no store {STORE!r}")
    if (version := hello.get("version")) != VERSION:
        raise WireError(
            f"{peer} speaks version {peer_text(str(version), 20)} of the store {STORE!r}; here is version"
            f" {VERSION}: install one version of kvplug-host at both ends"
        )


# -- fields ------------------------------------------------------------------------------------


def field(message: Any, name: str, kind: type[T]) -> T:
    """A field of that type.

    Raises:
        WireError: there is none.
    """
    found = message.get(name) if isinstance(message, Mapping) else None
    if type(found) is not kind:
        raise WireError(f"a message of a store: {name!r} is {type(found).__name__}, not {kind.__name__}")
    return found


def number(message: Any, name: str, *, most: int = 2**62) -> int:
    """A field that is an integer from 0 to ``most``. Raises WireError."""
    found = field(message, name, int)
    if not 0 <= found <= most:
        raise WireError(f"a message of a store: {name!r} is {found}, and must be 0 to {most}")
    return found


def seconds(message: Any, name: str) -> float:
    """A field that is a duration. Raises WireError."""
    found = field(message, name, float)
    if not 0 <= found < math.inf:
        raise WireError(f"a message of a store: {name!r} is {found!r} seconds")
    return min(found, MAX_FOR_S)


def keys_of(message: Any, most: int = MAX_KEYS) -> list[bytes]:
    """The keys in a message. Raises WireError."""
    joined = field(message, "keys", bytes)
    if len(joined) % KEY_BYTES or len(joined) > most * KEY_BYTES:
        raise WireError(f"a message of a store: {len(joined)} bytes are no keys, or too many")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def key_batches(keys: Sequence[bytes]) -> list[bytes]:
    """Keys as they are sent, in as many messages as they need."""
    return [b"".join(keys[at : at + MAX_KEYS]) for at in range(0, len(keys), MAX_KEYS)]


def num_batches(keys: Sequence[bytes]) -> int:
    """How many messages that are."""
    return -(-len(keys) // MAX_KEYS)


# -- results -----------------------------------------------------------------------------------

_PRESENCES: Final = (Presence.ABSENT, Presence.COMING, Presence.HELD)
_RESULTS: Final[tuple[PutReason | None, ...]] = (None, *PutReason)
SEND: Final = 255
"""In the answer to a put: send this page."""


def presences_to_bytes(presences: Sequence[Presence]) -> bytes:
    """A byte for each."""
    return bytes(map(_PRESENCES.index, presences))


def presences_from(message: Any, count: int) -> list[Presence]:
    """The inverse. Raises WireError."""
    return [_at(_PRESENCES, code) for code in _codes(message, count)]


def results_to_bytes(results: Sequence[PutReason | None]) -> bytes:
    """A byte for each."""
    return bytes(map(_RESULTS.index, results))


def put_codes(message: Any, count: int) -> list[int]:
    """A byte for each page: :data:`SEND`, or a result. Raises WireError."""
    return list(_codes(message, count))


def result_of(code: int) -> PutReason | None:
    """The result that a byte means. Raises WireError."""
    return _at(_RESULTS, code)


def _codes(message: Any, count: int) -> bytes:
    codes = field(message, "results", bytes)
    if len(codes) != count:
        raise WireError(f"a message of a store: {len(codes)} results for {count} pages")
    return codes


def _at(known: Sequence[T], code: int) -> T:
    if code >= len(known):
        raise WireError(f"a message of a store: no result is called {code}")
    return known[code]


def usage_to_plain(usage: Usage) -> list[Any]:
    """Pages, bytes, budget, and pages that wait for readers."""
    return [usage.num_pages, usage.used_bytes, usage.budget_bytes, usage.num_waiting]


def usage_from(message: Any) -> Usage:
    """The usage in an answer. Raises WireError."""
    found = field(message, "usage", list)
    if len(found) != 4 or not all(type(each) is int and each >= 0 for each in found):
        raise WireError("a message of a store: its usage is no usage")
    return Usage(num_pages=found[0], used_bytes=found[1], budget_bytes=found[2], num_waiting=found[3])


# -- where pages are ---------------------------------------------------------------------------


class Place(NamedTuple):
    """A page in shared memory."""

    offset: int
    """Of its slot: the page's bytes, then its header."""
    generation: int
    slot_bytes: int
    """With the generation, which is at its end."""
    payload_bytes: int
    header_bytes: int


_PLACE: Final = struct.Struct("<QQQQI")
ABSENT: Final = _PLACE.pack(0, 0, 0, 0, 0)


def place_to_bytes(place: Place) -> bytes:
    """Of a page that is there; :data:`ABSENT` for one that is not."""
    return _PLACE.pack(*place)


def places_from(message: Any, count: int, segment_bytes: int, num_segments: int) -> list[Place | None]:
    """Where the pages are; ``None`` for those that are absent.

    Nothing reaches out of its segment.

    Raises:
        WireError: something does, or there are not as many places as pages.
    """
    joined = field(message, "places", bytes)
    if len(joined) != count * _PLACE.size:
        raise WireError(f"a message of a store: {len(joined)} bytes are not the places of {count} pages")
    found: list[Place | None] = []
    for values in _PLACE.iter_unpack(joined):
        offset, generation, slot_bytes, payload_bytes, header_bytes = values
        if not generation:
            found.append(None)
            continue
        fits = payload_bytes + header_bytes + 8 <= slot_bytes
        inside = offset // segment_bytes == (offset + slot_bytes - 1) // segment_bytes < num_segments
        if not (fits and inside and offset % 8 == slot_bytes % 8 == 0):
            raise WireError(f"a message of a store: a page lies at {Place(*values)}")
        found.append(Place._make(values))
    return found


# -- pieces ------------------------------------------------------------------------------------


@attrs.frozen
class Pieces:
    """How pages are cut into pieces, each one message: bytes ``spans[i]`` of the pages ``ranges[j]``.

    The pieces come span after span; number ``i * len(ranges) + j``."""

    spans: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.spans) * len(self.ranges)

    def piece(self, at: int) -> tuple[tuple[int, int], range]:
        """The bytes of each page, and the pages."""
        span, part = divmod(at, len(self.ranges))
        return self.spans[span], range(*self.ranges[part])

    def to_plain(self) -> list[Any]:
        return [[list(each) for each in self.spans], [list(each) for each in self.ranges]]

    @classmethod
    def of(cls, message: Any, count: int, payload_bytes: int) -> Pieces:
        """The pieces that a message asks for, of ``count`` pages. Raises WireError."""
        plain = field(message, "pieces", list)
        if len(plain) != 2 or not all(isinstance(part, list) for part in plain):
            raise WireError("a message of a store: no pieces")
        spans, ranges = (_pairs(part) for part in plain)
        if (
            not 0 < len(spans) * len(ranges) <= MAX_PIECES
            or not _are_consecutive(spans, payload_bytes)
            or not _are_consecutive(ranges, count)
        ):
            raise WireError(f"a message of a store: pieces that are not those of {count} pages")
        return cls(spans, ranges)


def _pairs(plain: list[Any]) -> tuple[tuple[int, int], ...]:
    for each in plain:
        if not isinstance(each, list) or len(each) != 2 or not all(type(value) is int for value in each):
            raise WireError("a message of a store: no pieces")
    return tuple((first, last) for first, last in plain)


def _are_consecutive(pairs: Sequence[tuple[int, int]], last: int) -> bool:
    at = 0
    for begin, end in pairs:
        if begin != at or end <= begin:
            return False
        at = end
    return at == last


def tag(request: int, piece: int, rows: int, row_bytes: int) -> Tensor:
    """What comes over the pipe before a piece; no rows: no more pieces of that request come."""
    import torch

    return torch.tensor([request, piece, rows, row_bytes], dtype=torch.int64)


def read_tag(tensor: Any) -> tuple[int, int, int, int]:
    """The inverse. Raises WireError."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64 or tuple(tensor.shape) != (4,):
        raise WireError("over the pipe of a store came something else than a tag")
    request, piece, rows, row_bytes = tensor.tolist()
    if min(request, piece, rows, row_bytes) < 0 or bool(rows) != bool(row_bytes):
        raise WireError(f"over the pipe of a store came the tag {[request, piece, rows, row_bytes]}")
    return request, piece, rows, row_bytes


# -- puts --------------------------------------------------------------------------------------


def identities_of(message: Any, count: int) -> list[bytes]:
    """The identities in a put. Raises WireError."""
    found = field(message, "identities", list)
    if len(found) != count or not all(type(each) is bytes for each in found):
        raise WireError(f"a message of a store: {len(found)} identities for {count} pages")
    if sum(map(len, found)) > MAX_IDENTITIES:
        raise WireError("a message of a store: the identities are too long")
    return found


def format_of(message: Any) -> PageFormat:
    """The format in a put. Raises WireError."""
    try:
        form = PageFormat.from_plain(field(message, "format", dict))
    except (ValueError, OverflowError) as e:
        raise WireError(f"a message of a store: {e}") from e
    if form.num_layers * len(form.parts) > MAX_CHECKSUMS:
        raise WireError(f"a message of a store: a page of {form.num_layers} layers")
    return form
