"""The closed sets of operations and of reasons for failures, which bound the number of series."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from kvplug import errors


class Op(enum.StrEnum):
    """Counted operations, and what the duration of each includes."""

    SEND = "send"
    """One message through a pipe, from ``send_tensor`` to the end of its transfer."""
    RECV = "recv"
    """One message out of a pipe, in ``recv_tensor``, including the wait for the peer."""
    SAVE = "save"
    """KV of one request that one step of an engine completed, from the first block gathered until it is
    stored or sent."""
    LOAD = "load"
    """One request's KV, from asking for it until it is in the cache."""
    MATCH = "match"
    """One request whose KV was found elsewhere, however often its engine asks: the time of the answer, and in
    ``tokens`` the tokens found. A request that loads nothing counts as failed."""
    WAIT = "wait"
    """One request whose match was not known at once, usually because another engine still computes or saves
    its KV: from the first answer "not yet" to the first other answer, whether KV was found or not, or
    until the engine runs the request without asking again."""
    LOOKUP = "lookup"
    """One page that a store was asked for and has, until the store answered for the whole prompt. A missing
    page counts as failed."""
    GET = "get"
    """One page from a store, from the request for the prompt's pages until it is verified and in the caller's
    memory."""
    PUT = "put"
    """One page to a store, from the request to keep the prompt's pages until the store holds it."""
    COPY = "copy"
    """One page copied between an engine's stores: to a lower one after a save, or to a higher one after a
    load. The time of its batch."""
    EVICT = "evict"
    """One page that an engine's own store dropped to make room for another. Has no duration."""
    HANDSHAKE = "handshake"
    """One handshake with a peer, measured from when the connection is authenticated."""
    MEMBERS = "members"
    """One exchange with a directory of engines: this engine is announced, and the others are listed."""
    HINT = "hint"
    """One hint to fetch or to keep KV, which an engine's orchestrator sends with a request. Has no
    duration."""
    OTHER = "other"
    """An operation of a newer plugin that this core does not know."""


class Reason(enum.StrEnum):
    """Why something failed."""

    EXPIRED = "expired"
    """A lease, a ticket, or the time that a request waits for KV had expired."""
    REFUSED = "refused"
    """One end refused: the peer was not authenticated, the ends did not agree, or a tensor was unsuitable."""
    CORRUPT = "corrupt"
    """The received bytes differ from the sent ones: a hash differs, or the bytes are not a message."""
    TRANSPORT = "transport"
    """The transport failed for a reason that is not listed here."""
    TIMEOUT = "timeout"
    """The operation missed its deadline."""
    STALLED = "stalled"
    """No bytes arrived for too long, although the peer is alive."""
    SLOW = "slow"
    """The path was far slower than its transport claims, or than before, and the config refuses slow
    paths."""
    PEER_GONE = "peer_gone"
    """The other process died or closed, or counts as dead after a silence."""
    NO_ROOM = "no_room"
    """No room became free in time."""
    EXHAUSTED = "exhausted"
    """The process or its host ran out of descriptors, threads, memory or space."""
    GONE = "gone"
    """The entry existed when it was promised, but not when it was fetched."""
    TOO_LARGE = "too_large"
    """The data is larger than the whole budget."""
    CLOSED = "closed"
    """This end was closed or aborted during the operation."""
    ABSENT = "absent"
    """No source has the KV: a miss."""
    EVICTED = "evicted"
    """The page's memory was reused before the page was read."""
    UNREADABLE = "unreadable"
    """The entry under the page's key cannot be read, or cannot be replaced."""
    FORMAT = "format"
    """The stored entry has another format, version or protection."""
    IDENTITY = "identity"
    """The stored entry is the page of other tokens."""
    FORGED = "forged"
    """The proof of a page or an announcement was not made with the secret."""
    CANCELLED = "cancelled"
    """The caller no longer needed the result."""
    STORE_GONE = "store_gone"
    """The store cannot be reached, or failed."""
    READ_ONLY = "read_only"
    """The store cannot be written to from here."""
    NO_MEMORY = "no_memory"
    """This process did not have enough memory."""
    NOT_WORTH_IT = "not_worth_it"
    """Loading the KV would have taken more than twice as long as computing it, or four times as long from a
    peer."""
    IGNORED = "ignored"
    """The request was optional, and was ignored."""
    OTHER = "other"
    """Any other reason."""


_BY_ERROR: Final[Mapping[type, Reason]] = {
    errors.IntegrityError: Reason.CORRUPT,
    errors.WireError: Reason.CORRUPT,
    errors.EntryGoneError: Reason.GONE,
    errors.CapacityError: Reason.TOO_LARGE,
    errors.ClosedError: Reason.CLOSED,
    errors.ResourceExhaustedError: Reason.EXHAUSTED,
    errors.SlowPathError: Reason.SLOW,
    errors.StalledError: Reason.STALLED,
    errors.HandshakeError: Reason.REFUSED,
    errors.AuthenticationError: Reason.REFUSED,
    errors.ConfigError: Reason.REFUSED,
    errors.UnsupportedError: Reason.REFUSED,
    errors.TensorMismatchError: Reason.REFUSED,
    errors.LayoutError: Reason.REFUSED,
    errors.BusyError: Reason.REFUSED,
    TimeoutError: Reason.TIMEOUT,
    ConnectionError: Reason.PEER_GONE,
    OSError: Reason.TRANSPORT,
}
"""The reason for each class of errors and for its unlisted subclasses."""


def reason_of(error: BaseException) -> Reason:
    """Return the reason under which a failure with this error is counted.

    Never returns ``expired`` or ``no_room``: they do not have errors of their own, so callers name them. A
    timeout of ``insert``, for example, is ``no_room``.
    """
    found = (_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _BY_ERROR)
    return next(found, Reason.OTHER)
