"""What the two ends say to each other, as plain values over their channel. Each is checked before it counts.

piece     some bytes of a message lie in the sender's memory; of a message's first one also the prefix,
          as other pipes have it
taken     so many pieces were copied, and their room may be used again
beat      nothing; says that this end is alive
over      nothing more comes, and nothing more is taken
unmapped  this end has nothing of the other's open; the last word
"""

from __future__ import annotations

import enum
from typing import Any, Final

import attrs

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.messages import read_prefix
from kvplug.transport import WireError

WINDOW: Final = 64
"""How many pieces may lie there that were not taken: what a receiver that stops has to remember."""


class Kind(enum.StrEnum):
    PIECE = "piece"
    TAKEN = "taken"
    BEAT = "beat"
    OVER = "over"
    UNMAPPED = "unmapped"


@attrs.frozen
class Piece:
    """``prefix`` is empty but for the first of a message."""

    prefix: bytes
    offset: int
    nbytes: int

    def pack(self) -> list[Any]:
        return [Kind.PIECE.value, self.prefix, self.offset, self.nbytes]


def read(value: Any) -> tuple[Kind, Any]:
    """What was said, and about what: a :class:`Piece`, or how many.

    Raises:
        WireError: that is no word of this pipe.
    """
    try:
        name, *rest = value
        kind = Kind(name)
    except (TypeError, ValueError) as e:
        raise WireError("it says what is no word of the pipe 'cuda-ipc'") from e
    if kind is Kind.PIECE and len(rest) == 3:
        prefix, offset, nbytes = rest
        if isinstance(prefix, bytes) and _is_count(offset) and _is_count(nbytes):
            return kind, Piece(prefix, offset, nbytes)
    elif kind is Kind.TAKEN and len(rest) == 1 and _is_count(rest[0]):
        return kind, rest[0]
    elif kind not in (Kind.PIECE, Kind.TAKEN) and not rest:
        return kind, None
    raise WireError(f"what it says about {kind.value} cannot be read")


def meta_of_prefix(prefix: bytes) -> TensorMeta | None:
    """Raises WireError: it is no message's."""
    try:
        said = read_prefix(prefix)
    except UnsupportedError as e:
        raise WireError(str(e)) from e
    if said.goodbye or said.flags:
        raise WireError("a prefix that this pipe does not use")
    return said.meta


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
