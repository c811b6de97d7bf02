"""Facts of an engine that does not run, as an operator states them: ``num_layers=32``, ``block_size=16``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from kvplug.config.messages import bad_value, unknown_key
from kvplug.errors import ConfigError
from kvplug.negotiation.hello import BOTH, EngineFacts
from kvplug.negotiation.model import ModelInfo
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
    role=BOTH,
    model=ModelInfo(num_layers=1, num_kv_heads=1, head_size=1, dtype="float32", weights="not stated"),
    layout="KBTHD",
    block_size=16,
)
"""Of an engine that says nothing: both ends get the same for what neither has stated."""


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
        elif key == "layout" and (not set(value) <= set("LKBTHD") or len(set(value)) != len(value)):
            faults.append(bad_value(key, value, "some of LKBTHD, once each"))
        else:
            found[key] = int(value) if key in _NUMBERS else value
    if faults:
        raise ConfigError(*faults, source="the facts")
    return found


def token_bytes(facts: Mapping[str, Any]) -> int | None:
    """The KV of one token at one worker; ``None``: it is not stated.

    >>> token_bytes({"num_layers": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"})
    131072
    """
    if not facts.keys() >= {"num_layers", "num_kv_heads", "head_size", "dtype"}:
        return None
    _, itemsize = DTYPES.get(str(facts["dtype"]), (0, 0))
    vectors = 1 if facts.get("attention") == "mla" else 2
    heads = max(1, facts["num_kv_heads"] // facts.get("tensor_parallel_size", 1))
    return int(vectors * facts["num_layers"] * heads * facts["head_size"] * itemsize) or None


def engine_with(facts: Mapping[str, Any], role: str, like: EngineFacts | None = None) -> EngineFacts:
    """An engine with these facts; for the rest, like the other one."""
    base = like or _STAND_IN
    model = attrs.evolve(base.model, **{key: facts[key] for key in _MODEL if key in facts})
    return attrs.evolve(base, role=role, model=model, **{key: facts[key] for key in _ENGINE if key in facts})


def facts_from_peer(plain: object) -> dict[str, str | int]:
    """The facts that a peer has sent, as far as they are such; the others are left out."""
    found: dict[str, str | int] = {}
    for key, value in plain.items() if isinstance(plain, Mapping) else ():
        if key in FACTS and type(value) in (int, str):
            try:
                found.update(read_facts([f"{key}={value}"[:200]]))
            except ConfigError:
                continue
    return found
