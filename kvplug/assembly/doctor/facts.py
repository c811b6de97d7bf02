"""Facts about two engines: parsed from texts such as ``num_layers=32``, and compared between two Hellos."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import attrs
import msgspec

from kvplug.config.config import Role
from kvplug.config.messages import bad_value, unknown_key
from kvplug.errors import ConfigError, Reason
from kvplug.negotiation.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.net.peer_text import peer_text
from kvplug.net.wire.tensors import DTYPES

_MODEL: Final = typing.get_type_hints(ModelInfo)
_ENGINE: Final = (
    "cache_layers",
    "tensor_parallel_size",
    "tensor_parallel_rank",
    "layout",
    "block_size",
    "block_format",
)
MODEL_FACTS: Final = frozenset(_MODEL)
_TYPES: Final = {**_MODEL, **{name: typing.get_type_hints(EngineFacts)[name] for name in _ENGINE}}
FACTS: Final = tuple(_TYPES)
"""The names of the facts that can be stated."""
_STAND_IN: Final = EngineFacts(
    role=Role.BOTH,
    model=ModelInfo(num_layers=1, num_kv_heads=1, head_size=1, dtype="float32", weights="not stated"),
    layout="KBTHD",
    block_size=16,
)
"""Stands in for an unknown engine. Both ends get the same one, so that only stated facts can differ."""


def read_facts(given: Iterable[str]) -> dict[str, str | int]:
    """Parse facts from texts ``"key=value"``.

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
        elif key == "dtype" and value not in DTYPES:
            faults.append(bad_value(key, value, f"one of {', '.join(DTYPES)}"))
        else:
            try:
                found[key] = msgspec.convert(value, _TYPES[key], strict=False)
                engine_with({key: found[key]}, Role.BOTH)
            except msgspec.ValidationError:
                faults.append(bad_value(key, value, "a whole number"))
            except ValueError as e:
                faults.append(bad_value(key, value, f"another one: {e}"))
    if faults:
        raise ConfigError(*faults, source="the facts")
    return found


def token_bytes(facts: Mapping[str, Any]) -> int | None:
    """Return the bytes of one token's KV at one worker, or ``None`` if the facts do not determine it.

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
    """Return an engine with these facts, and all others from ``like`` (default: a stand-in)."""
    base = like or _STAND_IN
    model = attrs.evolve(base.model, **{key: facts[key] for key in _MODEL if key in facts})
    return attrs.evolve(base, role=role, model=model, **{key: facts[key] for key in _ENGINE if key in facts})


# -- two Hellos side by side ---------------------------------------------------------------------------

Outcome = Literal["agreed", "converted", "refused", "not compared", "information"]

_UNKNOWN: Final = "unknown"
_NONE: Final = "none"
_INFORMATIVE: Final = frozenset(
    {"model.name", "rank", "world_size", "epoch", "host", "pid", "kvplug", "device", "require_authenticated"}
)
_CONVERTED: Final = frozenset({"block_size", "layout", "device"})
_REFUSED_BY: Final = {"transports": "transport", "checksums": "integrity"}
"""Fields that are also refused by a reason about another field."""
_MAX_SHOWN: Final = 200


@attrs.frozen(kw_only=True)
class Field:
    """One handshake field, at both ends."""

    name: str
    ours: str
    theirs: str
    outcome: Outcome


def fields_of(
    ours: Mapping[str, str], theirs: Mapping[str, str], reasons: Collection[str]
) -> Iterator[Field]:
    """Yield every field, given the texts of :func:`values_of` for both ends and the reasons of a refusal."""
    refused = {reason.field for reason in reasons if isinstance(reason, Reason)}
    for name, mine in ours.items():
        yours = theirs.get(name, _NONE)
        is_known = _UNKNOWN not in (mine, yours)
        outcome: Outcome = "agreed"
        if _REFUSED_BY.get(name, name) in refused:
            outcome = "refused"
        elif name in _CONVERTED and is_known and mine != yours:
            outcome = "converted"
        elif name in _INFORMATIVE:
            outcome = "information"
        elif not is_known:
            outcome = "not compared"
        yield Field(name=name, ours=mine, theirs=yours, outcome=outcome)


def values_of(side: Hello, stated: Collection[str] | None = None) -> dict[str, str]:
    """Return the fields of a Hello as texts.

    Args:
        stated: the known facts of its engine if the engine is not running; ``None``: all are known.
    """
    found: dict[str, Any] = {
        "kvplug": side.versions.get("kvplug"),
        "host": side.identity.host,
        "pid": side.identity.pid,
        "wire": f"{side.wire[0]}.{side.wire[1]}",
        "engine": "no engine" if side.engine is None else "an engine",
    }
    engine = {} if side.engine is None else attrs.asdict(side.engine, recurse=False)
    for fact, value in (attrs.asdict(engine.pop("model")) | engine).items() if engine else ():
        name = f"model.{fact}" if fact in _MODEL and fact != "dtype" else fact
        found[name] = value if stated is None or fact in stated else _UNKNOWN
    for name in ("engine_id", "epoch", "device", "integrity", "checksums"):
        found[name] = getattr(side, name)
    found["transport"] = side.requested_transport
    found["transports"] = tuple(offer.name for offer in side.transports if offer.probe.viable)
    found["require_authenticated"] = side.require_authenticated
    return {name: _shown(value) for name, value in found.items()}


def _shown(value: Any) -> str:
    if value is None or value in ("", ()):
        return _NONE
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return peer_text(text, _MAX_SHOWN)
