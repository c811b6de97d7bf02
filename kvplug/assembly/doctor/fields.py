"""Every field of two Hellos, side by side: agreed, converted, refused, or not compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final, Literal

import attrs

from kvplug.assembly.examination.finding import field_of
from kvplug.negotiation.hello import EngineFacts, Hello
from kvplug.net.peer_text import peer_text

Outcome = Literal["agreed", "converted", "refused", "not compared", "information"]

_INFORMATIVE: Final = frozenset(
    {"model.name", "rank", "world_size", "epoch", "host", "pid", "kvplug", "device", "require_authenticated"}
)
_CONVERTED: Final = frozenset({"block_size", "layout", "device"})
_SAID_OF: Final = {
    "transport": ("transport", "transports"),
    "integrity": ("integrity", "checksums"),
    "dtype": ("dtype",),
}
"""The fields that a reason of a refusal is about, where they have other names."""
_NEEDS_NO_FACTS: Final = frozenset({"role", "rank", "world_size"})
_MAX_SHOWN: Final = 200


@attrs.frozen(kw_only=True)
class Field:
    """One field of the handshake at both ends."""

    name: str
    ours: str
    theirs: str
    outcome: Outcome


def fields_of(
    local: Hello,
    remote: Hello,
    reasons: Collection[str],
    stated: Collection[str],
) -> tuple[Field, ...]:
    """Every field. ``stated``: the facts of the engine that the operator gave; the others are the peer's."""
    refused = {name for reason in reasons for name in _SAID_OF.get(field_of(reason), (field_of(reason),))}
    theirs = dict(_values(remote))

    def outcome(name: str, ours: object, others: object) -> Outcome:
        if name in refused:
            return "refused"
        if name in _CONVERTED and ours != others:
            return "converted"
        if name in _INFORMATIVE:
            return "information"
        fact = name.removeprefix("model.")
        if name in _ENGINE_FIELDS and fact not in stated and name not in _NEEDS_NO_FACTS:
            return "not compared"
        return "agreed"

    return tuple(
        Field(
            name=name,
            ours=_shown(ours),
            theirs=_shown(theirs.get(name)),
            outcome=outcome(name, ours, theirs.get(name)),
        )
        for name, ours in _values(local)
    )


def _shown(value: Any) -> str:
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return peer_text(", ".join(map(str, value)), _MAX_SHOWN)
    return peer_text(str(value), _MAX_SHOWN)


def _engine_values(engine: EngineFacts | None) -> Iterator[tuple[str, Any]]:
    for field in attrs.fields(EngineFacts):
        if field.name == "model":
            for fact in attrs.asdict(engine.model) if engine else ():
                name = fact if fact == "dtype" else f"model.{fact}"
                yield name, getattr(engine.model, fact) if engine else None
        elif engine is not None:
            yield field.name, getattr(engine, field.name)


_ENGINE_FIELDS: Final = frozenset(
    {
        "role", "dtype", "layers", "cache_layers", "tensor_parallel_size", "tensor_parallel_rank", "layout",
        "block_size", "block_format", "rank", "world_size", "model.name", "model.attention",
        "model.num_layers", "model.num_kv_heads", "model.head_size", "model.rope", "model.window",
        "model.quantisation", "model.weights",
    }
)  # fmt: skip


def _values(side: Hello) -> Iterator[tuple[str, Any]]:
    yield "kvplug", side.versions.get("kvplug")
    yield "host", side.identity.host
    yield "pid", side.identity.pid
    yield "wire", f"{side.wire[0]}.{side.wire[1]}"
    yield "engine", "an engine" if side.engine is not None else "no engine"
    yield from _engine_values(side.engine)
    yield "engine_id", side.engine_id
    yield "epoch", side.epoch
    yield "device", side.device
    yield "integrity", side.integrity
    yield "checksums", side.checksums
    yield "transport", side.requested_transport
    yield "transports", tuple(offer.name for offer in side.transports if offer.probe.viable)
    yield "require_authenticated", side.require_authenticated
