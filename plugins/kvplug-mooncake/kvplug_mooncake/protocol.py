"""Messages between the store and its client process, one in each packet of their socket.

Their keys are kvplug's, of 32 bytes; :func:`name_of` converts them to Mooncake's. A value in Mooncake is
:data:`MARK` followed by the page: Mooncake stores no empty values, and any program may use a name."""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

import msgspec

LAYOUT: Final = 1
"""Version of names and values. Part of every name, so that a page of another version is a miss."""
MARK: Final = b"kvplug\0" + bytes([LAYOUT])
MAX_KEYS: Final = 1024
"""Limit for one message, which must fit into a packet."""
MAX_PACKET: Final = 1 << 17


def name_of(prefix: str, key: bytes) -> str:
    """Mooncake's name of a page."""
    return f"{prefix}:{LAYOUT}:{key.hex()}"


class Setup(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first message: the client's settings."""

    host: str
    """The address by which other Mooncake processes reach it."""
    master: str
    prefix: str
    protocol: str
    devices: str
    segment_bytes: int
    landing_bytes: int
    lanes: int
    timeout_s: float
    is_exposed: bool
    """Whether other hosts may connect to its Mooncake ports."""


class Exists(msgspec.Struct, tag=True, frozen=True):
    number: int
    keys: list[bytes]


class Get(msgspec.Struct, tag=True, frozen=True):
    number: int
    key: bytes
    at: int
    """Offset in the landing area."""
    nbytes: int


class Put(msgspec.Struct, tag=True, frozen=True):
    number: int
    key: bytes
    at: int
    nbytes: int


class Remove(msgspec.Struct, tag=True, frozen=True):
    number: int
    keys: list[bytes]


class Clear(msgspec.Struct, tag=True, frozen=True):
    number: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered at once, if a lane is free."""

    number: int


class Outcome(enum.StrEnum):
    DONE = "done"
    ABSENT = "absent"
    NO_ROOM = "no room"
    LATE = "late"
    """The holder of the page did not answer in time."""
    HOLDER_GONE = "holder gone"
    MASTER_GONE = "master gone"
    FAILED = "failed"
    """Mooncake reported something else."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Answers :class:`Setup`."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Answers :class:`Setup`: it failed, with the reason."""

    reason: str


class Answer(msgspec.Struct, tag=True, frozen=True):
    number: int
    outcome: Outcome
    nbytes: int = 0
    """Size of the value. If it exceeds the requested size, the value was not read."""
    held: bytes = b""
    """1 or 0 for each key."""
    text: str = ""


Request: TypeAlias = Setup | Exists | Get | Put | Remove | Clear | Ping
Reply: TypeAlias = Ready | Refused | Answer

encode: Final = msgspec.msgpack.encode
decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode
