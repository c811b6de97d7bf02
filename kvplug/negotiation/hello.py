"""The Hello: one side's description of itself, sent before anything else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplug.config.config import Role
from kvplug.errors import HandshakeError
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import AUTO, Offer
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import frames, from_plain, to_plain

DOCTOR = "doctor"
"""The purpose of a side that only tests whether an agreement is possible."""
MAX_TEXT: Final = 1000
"""The most characters of a text in a Hello."""
MAX_LIST: Final = 64
"""The most elements of a list or mapping in a Hello."""


@attrs.frozen(kw_only=True)
class EngineFacts:
    """An engine's description of its model, its KV cache and its place among the workers."""

    role: Role = attrs.field(converter=Role)
    """Whether it produces KV, consumes it, or both."""
    model: ModelInfo
    """The facts about the model that matter for its KV."""
    layers: tuple[int, int] | None = None
    """First layer of its pipeline stage, and one past the last; ``None`` if it does not belong to a single
    stage."""
    cache_layers: int | None = None
    """Layers in this side's cache, including a draft model's; ``None`` if it does not have a cache."""
    tensor_parallel_size: int = 1
    """Number of workers that the heads are split over."""
    tensor_parallel_rank: int | None = None
    """The shard of the heads that this side holds; ``None`` for a scheduler side."""
    layout: str
    """Axis letters of one layer's cache."""
    block_size: int
    """Tokens in a block."""
    block_format: str = ""
    """Name of the kernel's own order inside a block; empty if ``layout`` is the full description."""
    rank: int = 0
    """Rank of this worker in its engine."""
    world_size: int = 1
    """Number of workers of its engine."""
    splits_heads: bool = False
    """Whether its connector moves KV between engines that split the heads differently."""

    def __attrs_post_init__(self) -> None:
        for name in ("cache_layers", "tensor_parallel_size", "block_size", "world_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but is {value}")
        if not set(self.layout) <= set("KBTHD") or len(set(self.layout)) != len(self.layout):
            raise ValueError(
                f"layout must consist of letters from KBTHD, each at most once, but is {self.layout[:40]!a}"
            )


@attrs.frozen(kw_only=True)
class Hello:
    """A side's description of itself. ``agree`` compares two of them."""

    wire: tuple[int, int] = (frames.MAJOR, frames.MINOR)
    """Version of the wire format: major, minor."""
    purpose: str = ""
    """Why the dialling side connects, as a word chosen by the connector; empty at the accepting side."""
    moves_kv: bool = True
    """Whether tensors will cross. If it is false at either side, roles are not compared and no transport is
    selected."""
    engine: EngineFacts | None = None
    """``None``: a plain pipe, with no engine behind it."""

    # negotiated
    integrity: str = AUTO
    """``"auto"``, ``"off"``, or the name of the one hash that this side requires."""
    checksums: tuple[str, ...] = ()
    """Hashes that this side can use, preferred first; empty if integrity is off."""
    requested_transport: str = AUTO
    """``"auto"``, or the name of the one pipe that this side uses."""
    transports: tuple[Offer, ...] = ()
    """The pipes that are installed at this side and allowed by its config."""
    device: str = "cpu"
    """Type of the device whose memory the tensors are sent from or to."""
    require_authenticated: bool = False
    """Whether the data plane must authenticate, because other hosts can reach this side and its config
    requires it."""

    # informative
    engine_id: str = ""
    """The config's ``engine_id``, for messages."""
    epoch: str = ""
    """Changes when the process restarts."""
    identity: PeerIdentity
    """The process and its host, for liveness and to find out whether both ends are on one host."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Versions of kvplug, Python and torch, by name; for messages."""

    def __attrs_post_init__(self) -> None:
        names = [offer.name for offer in self.transports]
        if len(set(names)) != len(names):
            raise ValueError(f"transports contains a name twice: {', '.join(names)}")


def hello_from(plain: object) -> Hello:
    """Decode a peer's Hello from plain values, even one of another version.

    Raises:
        HandshakeError: a field is missing, malformed or out of bounds; the message names the first one.
    """
    hello = from_plain(plain, Hello, "hello", HandshakeError)
    _check(to_plain(hello), "hello")
    return attrs.evolve(
        hello, identity=attrs.evolve(hello.identity)
    )  # runs the converters, which make its texts safe to show in messages


def _check(value: Any, path: str) -> None:
    """Raise HandshakeError if a text, list or number within ``value`` is out of bounds."""
    match value:
        case str() if len(value) > MAX_TEXT or not value.isprintable():
            raise HandshakeError(
                f"{path}: expected up to {MAX_TEXT} printable characters, got {value[:40]!a}"
            )
        case list() | tuple() | dict() if len(value) > MAX_LIST:
            raise HandshakeError(f"{path}: expected up to {MAX_LIST} elements, got {len(value)}")
        case int() if not 0 <= value < 1 << 63:
            raise HandshakeError(f"{path}: expected an integer of 0 or more, of 63 bits, got {value}")
        case float() if not math.isfinite(value):
            raise HandshakeError(f"{path}: expected a finite number, got {value}")
        case dict():
            for key, item in value.items():
                _check(key, path)
                _check(item, f"{path}.{key}")
        case list() | tuple():
            for number, item in enumerate(value):
                _check(item, f"{path}[{number}]")
