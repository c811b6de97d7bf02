"""Facts about an engine, stated as texts such as ``num_layers=32``."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import msgspec

from kvplug.config.config import Role
from kvplug.config.messages import Fault, bad_value, unknown_key
from kvplug.config.options import in_words
from kvplug.errors import ConfigError
from kvplug.negotiation.hello import EngineFacts
from kvplug.negotiation.model import ModelInfo
from kvplug.net.wire.tensors import DTYPES

Facts = Mapping[str, Any]

MODEL_FACTS: Final = tuple(attrs.fields_dict(ModelInfo))
_ENGINE_FACTS: Final = (
    *("cache_layers", "tensor_parallel_size", "tensor_parallel_rank", "layout", "block_size"),
    "block_format",
)
FACTS: Final = (*MODEL_FACTS, *_ENGINE_FACTS)
"""The names of the facts that can be stated."""
_TYPES: Final = typing.get_type_hints(ModelInfo) | typing.get_type_hints(EngineFacts)
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
        ConfigError: a fact is wrong; the error lists every fault.
    """
    found: dict[str, str | int] = {}
    faults = []
    for text in given:
        key, _, value = (part.strip() for part in text.partition("="))
        if key not in FACTS:
            faults.append(unknown_key(key, FACTS))
            continue
        try:
            found[key] = msgspec.convert(value, _TYPES[key], strict=False)
            engine_with({key: found[key]}, Role.BOTH)
        except msgspec.ValidationError:
            faults.append(bad_value(key, value, in_words(_TYPES[key])))
        except ValueError as e:
            faults.append(Fault(str(e), key=key))
    if faults:
        raise ConfigError(*faults, source="the facts")
    return found


def token_bytes(facts: Facts) -> int | None:
    """Return the size in bytes of one token's KV in one worker, or ``None`` if the facts do not give it.

    >>> token_bytes({"num_layers": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"})
    131072
    """
    if not facts.keys() >= {"num_layers", "num_kv_heads", "head_size", "dtype"}:
        return None
    _, itemsize = DTYPES.get(str(facts["dtype"]), (0, 0))
    vectors = 1 if facts.get("attention") == "mla" else 2
    heads = max(1, facts["num_kv_heads"] // facts.get("tensor_parallel_size", 1))
    return int(vectors * facts["num_layers"] * heads * facts["head_size"] * itemsize) or None


def engine_with(facts: Facts, role: Role, like: EngineFacts | None = None) -> EngineFacts:
    """Return an engine with these facts; the others are those of ``like`` (default: a stand-in)."""
    base = like or _STAND_IN
    model, own = ({key: facts[key] for key in of if key in facts} for of in (MODEL_FACTS, _ENGINE_FACTS))
    return attrs.evolve(base, role=role, model=attrs.evolve(base.model, **model), **own)
