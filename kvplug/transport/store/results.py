"""The answers of a store: what it has, what it kept, what it could not give, and why."""

from __future__ import annotations

import enum

import attrs


class Presence(enum.StrEnum):
    """What a store says of one key."""

    HELD = "held"
    """The page is there, whole."""
    COMING = "coming"
    """Its writer has declared it; it will be there, or be absent after its deadline."""
    ABSENT = "absent"
    """The page is not there and not expected, or the store did not answer in time."""


class MissReason(enum.StrEnum):
    """Why a page could not be had. Every miss is counted under one of these."""

    ABSENT = "absent"
    """The store does not have it."""
    EVICTED = "evicted"
    """It was there, and its memory was used again before it was read."""
    EXPIRED = "expired"
    """Its lease, its time to live, or the time of a declared page was over."""
    FORMAT = "format"
    """What is there has another format: another version, layout, dtype, or protection."""
    IDENTITY = "identity"
    """What is there is the page of other tokens."""
    UNREADABLE = "unreadable"
    """What is there cannot be read: it belongs to another user, is no page, or its disk has a bad block."""
    CORRUPT = "corrupt"
    """Its bytes do not have the checksums in its header, or some of them are missing."""
    FORGED = "forged"
    """Its proof is not one made with the secret."""
    TIMEOUT = "timeout"
    """The store did not answer by the deadline."""
    CANCELLED = "cancelled"
    """The caller needs it no more."""
    STORE_GONE = "store_gone"
    """The store cannot be reached, or failed."""
    CLOSED = "closed"
    """This end of the store was closed."""
    NO_MEMORY = "no_memory"
    """This process has no memory to receive it."""
    SLOW = "slow"
    """The store gives far less than it did before, and the config refuses that."""
    OTHER = "other"
    """Another one, which the log has."""


class PutReason(enum.StrEnum):
    """Why a page was not kept."""

    NO_ROOM = "no_room"
    """The budget is used by pages that may not be evicted, or the disk is full."""
    TOO_LARGE = "too_large"
    """It is larger than the whole budget."""
    UNREADABLE = "unreadable"
    """What is there under its key can be neither read nor replaced; the log says why."""
    READ_ONLY = "read_only"
    """The store cannot be written to from here."""
    TIMEOUT = "timeout"
    """The store did not take it by the deadline."""
    CANCELLED = "cancelled"
    """The caller gave it up."""
    STORE_GONE = "store_gone"
    """The store cannot be reached, or failed."""
    CLOSED = "closed"
    """This end of the store was closed."""
    NO_MEMORY = "no_memory"
    """This process had no memory by the deadline to copy it through."""
    SLOW = "slow"
    """The store takes far less than it did before, and the config refuses that."""
    OTHER = "other"
    """Another one, which the log has."""

    @classmethod
    def of(cls, reason: MissReason) -> PutReason:
        """Why a page was not kept whose request ended for this reason."""
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
    """Pages that it holds."""
    used_bytes: int
    """Pages, headers, and what is lost between them."""
    budget_bytes: int | None
    """The most that it may hold; ``None``: the store has no limit of its own."""
    num_evicted: int = 0
    """Pages that this end gave up to make room since it was opened. Stores with events tell them there."""
    num_waiting: int = 0
    """Pages that another end is expected to read and has not (:meth:`Store.expect_reader`)."""
