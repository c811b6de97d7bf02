"""The messages between a store and the processes that use it over a link, and their bounds.

Over the channel: records. A :class:`Request` has a number, and its answers have the same number. Pages move
beside it:

- *mapped*: the store answers where the pages are, the other process copies them out of the shared memory and
  sends :class:`Done`. The store's part is one lookup.
- over the pipe, in *pieces*, each one message of blocks with a *tag* before it. Both ends compute the pieces
  of a get from its request. A put sends whole pages, each with its header. Where the store's memory is
  mapped, these lie in a region of memory that the other process has lent to the store, and only the tag goes
  over the pipe.

msgspec checks the types of a record and the bounds of its fields before it is used. A message that breaks the
rules ends the link.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple, TypeVar

import attrs
from msgspec import Meta

from kvplug.net.wire import from_plain, to_plain
from kvplug.transport import PageEvent, PageFormat, Pipe, Presence, PutReason, Usage, WireError, peer_text

if TYPE_CHECKING:
    from torch import Tensor

VERSION: Final = 6
STORE: Final = "host"
PIPE: Final = "pages"
"""The label of the pipe."""
MEMORY_PURPOSE: Final = "kvplug-host memory"
"""What a connection over which memory is handed out is for."""
TICKET_BYTES: Final = 16
"""Of what a process shows that maps the store's memory, with a descriptor of memory that it lends."""
WELCOME: Final = b"K"
"""The answer to a valid ticket, with a descriptor of the store's memory."""
REGIONS: Final = 4
REGION_BYTES: Final = 8 << 20
"""The memory that a process lends has so many regions of so many bytes each."""
KEY_BYTES: Final = 32
MAX_KEYS: Final = 1 << 16
"""In one request."""
MAX_LISTED: Final = 1 << 17
"""In one part of a list of all keys."""
MAX_PUTS: Final = 8
"""Puts that one process may have under way."""
MAX_IDENTITIES: Final = 8 << 20
"""Bytes of all identities in one request."""
HEADERS: Final = 4 << 20
"""Bytes of the headers in one answer to a fetch, or those of one page."""
MAX_CHECKSUMS: Final = 1 << 16
"""Parts in all layers of a page."""
MAX_PIECES: Final = 1 << 16
"""Of one request."""
MAX_PAGE: Final = 1 << 46
"""Bytes of a page. A request may name a page that no store can hold."""
MAX_FOR_S: Final = 1e8
"""Stands for no deadline."""

Id = Annotated[int, Meta(ge=0, le=2**62)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_FOR_S)]
SeriesId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Keys = Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]
"""Keys, one after the other."""
PerPage = Annotated[bytes, Meta(max_length=MAX_KEYS)]
"""A byte for each page."""
PageBytes = Annotated[int, Meta(ge=0, le=MAX_PAGE)]

Traceparent = Annotated[str, Meta(max_length=128)]
"""The context of the trace that a request belongs to; empty: none."""

T = TypeVar("T")
R = TypeVar("R", bound="Request")


# -- answers -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Answer:
    """What a store answers to the request of that number."""

    id: Id = 0
    is_last: bool = True
    """Whether it is the last answer to that request."""
    usage: Usage | None = None
    """What the store holds now; ``None``: not stated."""

    def __attrs_post_init__(self) -> None:
        usage = self.usage
        if usage is not None and min(usage.num_pages, usage.used_bytes, usage.budget_bytes or 0) < 0:
            raise ValueError(f"a store cannot hold {usage}")


@attrs.frozen(kw_only=True)
class Results(Answer):
    """A result for each page."""

    codes: PerPage


@attrs.frozen(kw_only=True)
class Places(Answer):
    """Where pages are in shared memory."""

    places: Annotated[bytes, Meta(max_length=MAX_KEYS * 36)]


@attrs.frozen(kw_only=True)
class Fetched(Answer):
    """Which of the next pages are sent, and the header of each page; empty: the store does not have it."""

    codes: PerPage
    headers: Annotated[list[bytes], Meta(max_length=MAX_KEYS)]


@attrs.frozen(kw_only=True)
class Listed(Answer):
    """The next keys of a series."""

    keys: Annotated[bytes, Meta(max_length=MAX_LISTED * KEY_BYTES)]

    def __attrs_post_init__(self) -> None:
        _check_keys(self.keys)


@attrs.frozen(kw_only=True)
class Hello(Answer):
    """The first message, from the store."""

    epoch: str
    memory_bytes: Annotated[int, Meta(gt=0, le=2**46, multiple_of=4096)]
    """Of all of its memory."""
    memory: str
    """Where the memory is handed out; empty: nowhere."""
    ticket: bytes
    store: str = STORE
    version: int = VERSION


# -- requests ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Request:
    """A request of a process to a store."""

    id: Id = 0
    """The number of the request; 0: it has no answer."""
    answer: ClassVar[type[Answer]] = Answer

    @classmethod
    def answer_in(cls, message: Any) -> Any:
        """The answer in a message. Raises WireError."""
        return from_plain(message, cls.answer, f"answer of a store to {op_of(cls)!r}")


@attrs.frozen(kw_only=True)
class OfKeys(Request):
    """A request about some pages."""

    keys: Keys

    def __attrs_post_init__(self) -> None:
        _check_keys(self.keys)

    @property
    def each(self) -> list[bytes]:
        """The keys."""
        return split(self.keys)


@attrs.frozen(kw_only=True)
class Lookup(OfKeys):
    """Which pages are there."""

    answer = Results
    lease_s: Seconds


@attrs.frozen(kw_only=True)
class Read(OfKeys):
    """Where pages are, which are leased to the reader until :class:`Done`."""

    answer = Places
    lease_s: Seconds
    traceparent: Traceparent = ""


@attrs.frozen(kw_only=True)
class Done(Request):
    """The read of that number has ended."""

    read: bool
    """Whether it has got its pages."""


@attrs.frozen(kw_only=True)
class Fetch(OfKeys):
    """Send pages over the pipe, in :attr:`pieces`. Their headers come in several answers."""

    answer = Fetched
    payload_bytes: PageBytes
    row_bytes: Annotated[int, Meta(gt=0, le=MAX_PAGE)]
    """Bytes of each row of a piece."""
    rows: Annotated[int, Meta(gt=0)]
    """How many rows of each page are in a piece, or fewer in the last ones."""
    as_blocks: bool
    """Whether a piece begins with the first row of each page. Else it begins with all rows of one page."""
    pages: Annotated[int, Meta(gt=0)]
    """How many pages are in a piece, or fewer in the last ones."""
    timeout_s: Seconds
    traceparent: Traceparent = ""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.payload_bytes % self.row_bytes or not 0 < len(self.pieces) <= MAX_PIECES:
            raise ValueError(f"pages of {self.payload_bytes} bytes are not sent in such pieces")

    @property
    def pieces(self) -> Pieces:
        """How the pages are cut."""
        count = len(self.keys) // KEY_BYTES
        return Pieces(self.payload_bytes // self.row_bytes, self.rows, count, self.pages)


@attrs.frozen(kw_only=True)
class Cancel(Request):
    """Send no more of the fetch of that number, or expect no more of the put."""


@attrs.frozen(kw_only=True)
class Put(OfKeys):
    """Pages that come over the pipe, or in lent memory. The first answer has :data:`SEND` for those that are
    wanted, the last one the results of all."""

    answer = Results
    identities: Annotated[list[bytes], Meta(max_length=MAX_KEYS)]
    format: PageFormat
    shard: Annotated[bytes, Meta(max_length=4096)]
    checksums: bool
    timeout_s: Seconds

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.keys or len(self.identities) * KEY_BYTES != len(self.keys):
            raise ValueError(f"{len(self.identities)} identities for {len(self.keys) // KEY_BYTES} pages")
        if sum(map(len, self.identities)) > MAX_IDENTITIES:
            raise ValueError("the identities are too long")
        if self.format.num_layers * len(self.format.parts) > MAX_CHECKSUMS or self.format.nbytes > MAX_PAGE:
            raise ValueError(f"a page of {self.format.num_layers} layers is too large")


@attrs.frozen(kw_only=True)
class Lend(Request):
    """Pages of puts may be in the memory that came with the ticket. Each answer has the numbers of regions
    that the store has read."""

    answer = Results


@attrs.frozen(kw_only=True)
class Remove(OfKeys):
    """Forget pages."""


@attrs.frozen(kw_only=True)
class Declare(OfKeys):
    """These pages are going to be put."""

    series: SeriesId
    for_s: Seconds
    """Within how long."""


@attrs.frozen(kw_only=True)
class Withdraw(OfKeys):
    """Declared pages are not put after all."""


@attrs.frozen(kw_only=True)
class Release(OfKeys):
    """End the leases on pages."""


@attrs.frozen(kw_only=True)
class Touch(OfKeys):
    """Pages were used elsewhere."""


@attrs.frozen(kw_only=True)
class Expect(OfKeys):
    """Another end is going to read these pages."""


@attrs.frozen(kw_only=True)
class Wrong(OfKeys):
    """A page that was read is wrong."""

    generation: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Of the page; 0: not known."""


@attrs.frozen(kw_only=True)
class List(Request):
    """All keys of a series, in several answers."""

    answer = Listed
    series: SeriesId


@attrs.frozen(kw_only=True)
class Subscribe(Request):
    """Send a snapshot, then every event, each with this number."""

    @classmethod
    def answer_in(cls, message: Any) -> PageEvent:
        return PageEvent.from_plain(message)


@attrs.frozen(kw_only=True)
class Unsubscribe(Request):
    """Send no more events with this number."""


# -- how they are sent -------------------------------------------------------------------------


def op_of(kind: type[Request]) -> str:
    """What a request is called in its message."""
    return kind.__name__.lower()


def message_of(request: Request) -> dict[str, Any]:
    """A request as a message for the channel."""
    return {"op": op_of(type(request)), **to_plain(request)}


def request_in(message: Any, kinds: dict[str, type[R]]) -> R:
    """The request in a message.

    Args:
        kinds: the requests that there are, by what they are called.

    Raises:
        WireError: it is not one of them, or a field is missing, of another type or out of bounds.
    """
    op = message.get("op") if isinstance(message, dict) else None
    kind = kinds.get(op) if isinstance(op, str) else None
    if kind is None:
        raise WireError(f"a message to a store: unknown request {op!r:.40}")
    return from_plain(message, kind, f"request {op!r} to a store")


def number_in(message: Any) -> int:
    """The number of the request that a message answers. Raises WireError."""
    number = message.get("id") if isinstance(message, dict) else None
    if type(number) is not int:
        raise WireError("a message of a store has no number")
    return number


def for_wire(seconds: float | None) -> float:
    """A duration that can be sent; ``None``: no deadline."""
    return MAX_FOR_S if seconds is None else min(float(seconds), MAX_FOR_S)


def hello_in(message: Any, peer: object) -> Hello:
    """The first message of a store of this version. Raises WireError."""
    if not isinstance(message, dict) or message.get("store") != STORE:
        raise WireError(f"{peer} does not serve a store {STORE!r}")
    if (version := message.get("version")) != VERSION:
        raise WireError(
            f"{peer} uses version {peer_text(str(version), 20)} of the protocol of the store {STORE!r}, this"
            f" process version {VERSION}: install one version of kvplug-host at both ends"
        )
    return from_plain(message, Hello, "the first message of a store")


def _check_keys(joined: bytes) -> None:
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not keys of {KEY_BYTES} bytes")


def split(joined: bytes) -> list[bytes]:
    """The keys that were sent one after the other."""
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


def key_batches(keys: Sequence[bytes]) -> list[bytes]:
    """Keys as they are sent, in as many messages as they need."""
    return [b"".join(keys[at : at + MAX_KEYS]) for at in range(0, len(keys), MAX_KEYS)]


# -- results -----------------------------------------------------------------------------------

PRESENCES: Final = (Presence.ABSENT, Presence.COMING, Presence.HELD)
"""The results of a lookup, by code."""
PUT_RESULTS: Final[tuple[PutReason | None, ...]] = (None, *PutReason)
"""The results of a put, by code."""
SEND: Final = 255
"""In the answer to a put: send this page."""
ABSENT_PAGE, SENT, OTHER_SIZE = range(3)
"""In the answer to a fetch: the store has no such page, sends it, or has a page of another size."""


def codes_of(known: Sequence[T], results: Iterable[T]) -> bytes:
    """A byte for each result."""
    return bytes(map(known.index, results))


def results_in(known: Sequence[T], codes: Iterable[int]) -> list[T]:
    """The results that these codes mean. Raises WireError."""
    try:
        return [known[code] for code in codes]
    except IndexError:
        raise WireError(f"a message of a store: a code is not one of {len(known)} results") from None


def check_count(codes: Sequence[object], count: int) -> None:
    """There is a code for each page. Raises WireError."""
    if len(codes) != count:
        raise WireError(f"a message of a store: {len(codes)} results for {count} pages")


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


def places_in(joined: bytes, count: int, memory_bytes: int) -> list[Place | None]:
    """Where the pages are; ``None`` for those that are absent.

    Nothing reaches out of the memory.

    Raises:
        WireError: something does, or there are not as many places as pages.
    """
    if len(joined) != count * _PLACE.size:
        raise WireError(f"a message of a store: {len(joined)} bytes are not the places of {count} pages")
    found: list[Place | None] = []
    for values in _PLACE.iter_unpack(joined):
        offset, generation, slot_bytes, payload_bytes, header_bytes = values
        if not generation:
            found.append(None)
            continue
        fits = payload_bytes + header_bytes + 8 <= slot_bytes
        if not (fits and offset + slot_bytes <= memory_bytes and offset % 8 == slot_bytes % 8 == 0):
            raise WireError(f"a message of a store: a page lies at {Place(*values)}")
        found.append(Place._make(values))
    return found


# -- pieces ------------------------------------------------------------------------------------


@attrs.frozen
class Pieces:
    """How pages of ``num_rows`` rows each are cut into pieces: some rows of some pages.

    Piece number ``i * num_parts + j`` has the ``i``-th rows of the ``j``-th part of the pages."""

    num_rows: int
    rows_step: int
    num_pages: int
    pages_step: int

    @property
    def num_parts(self) -> int:
        """How many parts the pages are cut into."""
        return -(-self.num_pages // self.pages_step)

    def __len__(self) -> int:
        return -(-self.num_rows // self.rows_step) * self.num_parts

    def piece(self, number: int) -> tuple[range, range]:
        """The rows of each page, and the pages."""
        rows, part = divmod(number, self.num_parts)
        return (
            _step(rows, self.rows_step, self.num_rows),
            _step(part, self.pages_step, self.num_pages),
        )


def _step(number: int, step: int, end: int) -> range:
    return range(number * step, min((number + 1) * step, end))


def tag(request: int, number: int, count: int, region: int | None = None) -> Tensor:
    """The message before pages of a request on the pipe.

    Args:
        number: of a get: the piece's number. Of a put: the first page that may be among them.
        count: how many pages come; 0: no more of that request.
        region: of lent memory, where the pages are; ``None``: they come over the pipe.
    """
    import torch

    return torch.tensor([request, number, count, 0 if region is None else 1 + region], dtype=torch.int64)


def receive_tag(pipe: Pipe) -> tuple[int, int, int, int | None]:
    """Wait for the next tag.

    Raises:
        KvplugError: as :meth:`Pipe.recv_tensor`, for something else than a tag as well.
    """
    import torch

    numbers = torch.empty(4, dtype=torch.int64)
    pipe.recv_tensor(numbers, timeout=None)
    request, number, count, place = numbers.tolist()
    if min(request, number, count, place) < 0 or place > REGIONS:
        raise WireError(f"over the pipe of a store came the tag {[request, number, count, place]}")
    return request, number, count, place - 1 if place else None
