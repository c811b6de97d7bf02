"""The answers of a store: which pages it has, which it kept, and why it missed or refused others."""

from __future__ import annotations

import enum

import attrs


class Presence(enum.StrEnum):
    """A store's answer about one key."""

    HELD = "held"
    """The store has the whole page."""
    COMING = "coming"
    """Its writer has declared the page, and will put it by a deadline, after which it is absent."""
    ABSENT = "absent"
    """The store neither has nor expects the page, or did not answer in time."""


class MissReason(enum.StrEnum):
    """Why a page was missed. Every miss is counted under one of these."""

    ABSENT = "absent"
    """The store does not have the page."""
    EVICTED = "evicted"
    """The page's memory was reused before the page was read."""
    EXPIRED = "expired"
    """The page's lease or time to live has ended, or a declared page was not put in time."""
    FORMAT = "format"
    """The page under the key has another version, layout, dtype or protection."""
    IDENTITY = "identity"
    """The page under the key belongs to other tokens."""
    UNREADABLE = "unreadable"
    """The page cannot be read: another user owns it, it is not a page, or its disk has a bad block."""
    CORRUPT = "corrupt"
    """The page's bytes do not match the checksums in its header, or some bytes are missing."""
    FORGED = "forged"
    """The page's proof was not made with the secret."""
    TIMEOUT = "timeout"
    """The store did not answer by the deadline."""
    CANCELLED = "cancelled"
    """The caller cancelled the request."""
    STORE_GONE = "store_gone"
    """The store cannot be reached, or failed."""
    CLOSED = "closed"
    """This end of the store was closed."""
    NO_MEMORY = "no_memory"
    """This process has no memory to receive the page."""
    SLOW = "slow"
    """The store is far slower than before, and the config refuses that."""
    OTHER = "other"
    """Another reason, which is in the log."""


class PutReason(enum.StrEnum):
    """Why a page was not kept."""

    NO_ROOM = "no_room"
    """Pages that may not be evicted use up the budget, or the disk is full."""
    TOO_LARGE = "too_large"
    """The page is larger than the whole budget."""
    UNREADABLE = "unreadable"
    """The content under the key can be neither read nor replaced; the log has the cause."""
    READ_ONLY = "read_only"
    """This end cannot write to the store."""
    TIMEOUT = "timeout"
    """The store did not take the page by the deadline."""
    CANCELLED = "cancelled"
    """The caller cancelled the request, or the page was removed before it was kept."""
    STORE_GONE = "store_gone"
    """The store cannot be reached, or failed."""
    CLOSED = "closed"
    """This end of the store was closed."""
    NO_MEMORY = "no_memory"
    """By the deadline, this process had no memory for an intermediate copy of the page."""
    SLOW = "slow"
    """The store is far slower than before, and the config refuses that."""
    OTHER = "other"
    """Another reason, which is in the log."""

    @classmethod
    def of(cls, reason: MissReason) -> PutReason:
        """Return the put reason that corresponds to ``reason``."""
        if reason is MissReason.NO_MEMORY:
            return cls.NO_ROOM
        try:
            return cls(reason.value)
        except ValueError:
            return cls.OTHER


@attrs.frozen(kw_only=True)
class Usage:
    """What a store holds."""

    num_pages: int
    """Number of pages."""
    used_bytes: int
    """Bytes of pages and headers, and of the gaps between them."""
    budget_bytes: int | None
    """The most bytes that it may hold, or ``None`` if the store has no limit of its own."""
    num_evicted: int = 0
    """Pages that this end has evicted since it was opened; 0 for stores whose events report evictions."""
    num_waiting: int = 0
    """Pages that another end is expected to read but has not read yet (:meth:`Store.expect_reader`)."""
