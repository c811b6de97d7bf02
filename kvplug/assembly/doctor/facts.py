"""Facts of two engines: as an operator states them, ``num_layers=32``, and of two Hellos side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import attrs

from kvplug.config.config import Role
from kvplug.config.messages import bad_value, unknown_key
from kvplug.errors import ConfigError, Reason
from kvplug.negotiation.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.net.peer_text import peer_text
from kvplug.net.wire.tensors import DTYPES

_MODEL: Final = tuple(field.name for field in attrs.fields(ModelInfo))
_ENGINE: Final = (
    "cache_layers",
    "tensor_parallel_size",
    "tensor_parallel_rank",
    "layout",
    "block_size",
    "block_format",
)
FACTS: Final = (*_MODEL, *_ENGINE)
"""Names of the facts that can be stated."""
MODEL_FACTS: Final = frozenset(_MODEL)
_NUMBERS: Final = frozenset(
    {"num_layers", "num_kv_heads", "head_size", "window", "cache_layers", "block_size"}
    | {"tensor_parallel_size", "tensor_parallel_rank"}
)
_STAND_IN: Final = EngineFacts(
    role=Role.BOTH,
    model=ModelInfo(num_layers=1, num_kv_heads=1, head_size=1, dtype="float32", weights="not stated"),
    layout="KBTHD",
    block_size=16,
)
"""An engine of which nothing is known. Both ends get the same, so that only stated facts can differ."""


def read_facts(given: Iterable[str]) -> dict[str, str | int]:
    """The facts in texts ``"key=value"``.

    >>> read_facts(["num_layers=32", "dtype=bfloat16"])
    {'num_layers': 32, 'dtype': 'bfloat16'}

    Raises:
        ConfigError: with every fault.
    """
    found: dict[str, str | int] = {}
    faults = []
    for text in given:
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator:
            faults.append(f"{text!r} was given; expected KEY=VALUE, as in num_layers=32")
        elif key not in FACTS:
            faults.append(unknown_key(key, FACTS))
        elif key in _NUMBERS and not value.isdecimal():
            faults.append(bad_value(key, value, "a whole number"))
        elif key == "dtype" and value not in DTYPES:
            faults.append(bad_value(key, value, f"one of {', '.join(DTYPES)}"))
        elif key == "layout" and (not set(value) <= set("KBTHD") or len(set(value)) != len(value)):
            faults.append(bad_value(key, value, "some of LKBTHD, once each"))
        else:
            found[key] = int(value) if key in _NUMBERS else value
    if faults:
        raise ConfigError(*faults, source="the facts")
    return found


def facts_from_peer(plain: object) -> dict[str, str | int]:
    """The facts in a peer's report; malformed ones are left out."""
    found: dict[str, str | int] = {}
    for key, value in plain.items() if isinstance(plain, Mapping) else ():
        if key in FACTS and type(value) in (int, str):
            try:
                found.update(read_facts([f"{key}={value}"[:200]]))
            except ConfigError:
                continue
    return found


def token_bytes(facts: Mapping[str, Any]) -> int | None:
    """The KV of one token at one worker; ``None``: the facts do not say it.

    >>> token_bytes({"num_layers": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"})
    131072
    """
    if not facts.keys() >= {"num_layers", "num_kv_heads", "head_size", "dtype"}:
        return None
    _, itemsize = DTYPES.get(str(facts["dtype"]), (0, 0))
    vectors = 1 if facts.get("attention") == "mla" else 2
    heads = max(1, facts["num_kv_heads"] // facts.get("tensor_parallel_size", 1))
    return int(vectors * facts["num_layers"] * heads * facts["head_size"] * itemsize) or None


def engine_with(facts: Mapping[str, Any], role: Role, like: EngineFacts | None = None) -> EngineFacts:
    """An engine with these facts; for the rest, like the other one."""
    base = like or _STAND_IN
    model = attrs.evolve(base.model, **{key: facts[key] for key in _MODEL if key in facts})
    return attrs.evolve(base, role=role, model=model, **{key: facts[key] for key in _ENGINE if key in facts})


# -- two Hellos side by side ---------------------------------------------------------------------------

Outcome = Literal["agreed", "converted", "refused", "not compared", "information"]

_UNKNOWN: Final = "unknown"
_INFORMATIVE: Final = frozenset(
    {"model.name", "rank", "world_size", "epoch", "host", "pid", "kvplug", "device", "require_authenticated"}
)
_CONVERTED: Final = frozenset({"block_size", "layout", "device"})
_REFUSED_BY: Final = {"transports": "transport", "checksums": "integrity"}
"""The fields that a reason about another field refuses as well."""
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
    ours: Collection[str],
    theirs: Collection[str] | None = None,
) -> tuple[Field, ...]:
    """Every field. ``ours``, ``theirs``: the facts that were stated of the two engines, where they do not
    run; ``None``: that engine runs. Others are unknown."""
    refused = {reason.field for reason in reasons if isinstance(reason, Reason)}
    yours = dict(_values(remote))
    found = []
    for name, mine in _values(local):
        fact = name.removeprefix("model.")
        is_ours = name not in _ENGINE_FIELDS or fact in ours or (name == "role" and theirs is None)
        is_theirs = name not in _ENGINE_FIELDS or theirs is None or fact in theirs
        outcome: Outcome = "agreed"
        if _REFUSED_BY.get(name, name) in refused:
            outcome = "refused"
        elif name in _CONVERTED and is_ours and is_theirs and mine != yours.get(name):
            outcome = "converted"
        elif name in _INFORMATIVE:
            outcome = "information"
        elif not (is_ours and is_theirs):
            outcome = "not compared"
        found.append(
            Field(
                name=name,
                ours=_shown(mine) if is_ours else _UNKNOWN,
                theirs=_shown(yours.get(name)) if is_theirs else _UNKNOWN,
                outcome=outcome,
            )
        )
    return tuple(found)


def _shown(value: Any) -> str:
    if value is None or value in ("", ()):
        return "none"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return peer_text(text, _MAX_SHOWN)


def _engine_values(engine: EngineFacts) -> Iterator[tuple[str, Any]]:
    for field in attrs.fields(EngineFacts):
        if field.name == "model":
            for fact, value in attrs.asdict(engine.model).items():
                yield fact if fact == "dtype" else f"model.{fact}", value
        else:
            yield field.name, getattr(engine, field.name)


_ENGINE_FIELDS: Final = frozenset(name for name, _ in _engine_values(_STAND_IN))


def _values(side: Hello) -> Iterator[tuple[str, Any]]:
    yield "kvplug", side.versions.get("kvplug")
    yield "host", side.identity.host
    yield "pid", side.identity.pid
    yield "wire", f"{side.wire[0]}.{side.wire[1]}"
    yield "engine", "no engine" if side.engine is None else "an engine"
    yield from () if side.engine is None else _engine_values(side.engine)
    yield "engine_id", side.engine_id
    yield "epoch", side.epoch
    yield "device", side.device
    yield "integrity", side.integrity
    yield "checksums", side.checksums
    yield "transport", side.requested_transport
    yield "transports", tuple(offer.name for offer in side.transports if offer.probe.viable)
    yield "require_authenticated", side.require_authenticated
