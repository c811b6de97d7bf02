"""The closed sets of operations and of reasons for failures, which bound the number of series."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from kvplug import errors


class Op(enum.StrEnum):
    """Counted operations. ``docs/reference/metrics.md`` says what the duration of each includes."""

    SEND = "send"
    """One message through a pipe, from ``send_tensor`` to the end of its transfer."""
    RECV = "recv"
    """One message out of a pipe, in ``recv_tensor``: the wait for the peer included."""
    SAVE = "save"
    """One request's KV, from the first block gathered until it is stored or sent."""
    LOAD = "load"
    """One request's KV, from asking for it until it is in the cache."""
    MATCH = "match"
    """One request that asks how many tokens are held elsewhere; ``tokens`` is the first answer."""
    LOOKUP = "lookup"
    """One key asked for at a store. A page that is not there counts under the reason ``absent``."""
    GET = "get"
    """One page out of a store, until it is verified and in the caller's memory."""
    PUT = "put"
    """One page into a store, until it is held."""
    COPY = "copy"
    """One page from one store of an engine into another: behind a save, or up after a load."""
    EVICT = "evict"
    """One page that an engine's own store gave up to make room for another."""
    HANDSHAKE = "handshake"
    """One agreement with a peer, from the proven connection on."""
    MEMBERS = "members"
    """One round with a directory of engines: this one is announced, and the others are listed."""
    HINT = "hint"
    """One hint that an engine's orchestrator gave with a request: to fetch KV, or to keep it."""
    OTHER = "other"
    """An operation of a newer plugin that this core does not know."""


class Reason(enum.StrEnum):
    """Why something failed."""

    EXPIRED = "expired"
    """A lease or a ticket was over its time."""
    REFUSED = "refused"
    """One end did not want it: not proven, not agreed on, not a tensor that it takes."""
    CORRUPT = "corrupt"
    """What arrived is not what was sent: a hash differs, or bytes are not a message."""
    TRANSPORT = "transport"
    """The transport failed in a way that has no better name."""
    TIMEOUT = "timeout"
    """It was not done by its deadline."""
    STALLED = "stalled"
    """Nothing of it came for too long, though its peer lives."""
    SLOW = "slow"
    """It carried far less than its transport claims, or than before, and the config refuses that."""
    PEER_GONE = "peer_gone"
    """The other process died or closed, or counts as dead after a silence."""
    NO_ROOM = "no_room"
    """There was no room for it in time."""
    EXHAUSTED = "exhausted"
    """The process or its host had no free descriptor, thread, memory or space for it."""
    GONE = "gone"
    """The entry was there when it was promised, and was not when it was fetched."""
    TOO_LARGE = "too_large"
    """It is larger than the whole budget it would have to fit into."""
    CLOSED = "closed"
    """This end was closed or aborted while it was under way."""
    ABSENT = "absent"
    """The store does not have the page."""
    EVICTED = "evicted"
    """The page was there, and its memory was used again before it was read."""
    UNREADABLE = "unreadable"
    """What is there under the page's key cannot be read, or not be replaced."""
    FORMAT = "format"
    """What is stored there has another format, version or protection."""
    IDENTITY = "identity"
    """What is stored there is the page of other tokens."""
    FORGED = "forged"
    """The proof of a page or an announcement was not made with the secret."""
    CANCELLED = "cancelled"
    """The caller needed it no more."""
    STORE_GONE = "store_gone"
    """The store cannot be reached, or failed."""
    READ_ONLY = "read_only"
    """The store cannot be written to from here."""
    NO_MEMORY = "no_memory"
    """This process had no memory for it."""
    NOT_WORTH_IT = "not_worth_it"
    """Loading it would have taken longer than computing it."""
    IGNORED = "ignored"
    """It is allowed to do nothing about it, and nothing was done."""
    OTHER = "other"
    """None of these."""


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
    errors.LentError: Reason.REFUSED,
    errors.BusyError: Reason.REFUSED,
    TimeoutError: Reason.TIMEOUT,
    ConnectionError: Reason.PEER_GONE,
    OSError: Reason.TRANSPORT,
}
"""The reason of each class of errors, and of its subclasses that are not listed."""


def reason_of(error: BaseException) -> Reason:
    """The reason under which a failure with this error is counted.

    ``expired`` and ``no_room`` have no error of their own: the caller passes them. ``no_room`` is, for
    example, a timeout of ``insert``.
    """
    found = (_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _BY_ERROR)
    return next(found, Reason.OTHER)
