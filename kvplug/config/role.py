"""The role of a process: whether it saves KV, loads it, or both."""

from __future__ import annotations

import enum
from typing import Any

from kvplug.config.messages import bad_value, nearest
from kvplug.errors import ConfigError


class Role(enum.StrEnum):
    """What this process does with KV. vLLM's names, ``kv_producer`` and so on, are accepted too."""

    PRODUCER = "producer"
    """It computes KV that others load: prefill."""
    CONSUMER = "consumer"
    """It loads KV that others computed: decode."""
    BOTH = "both"
    """Both; also one engine alone that keeps its own KV."""

    @property
    def produces(self) -> bool:
        """Whether this process offers KV to others."""
        return self is not Role.CONSUMER

    @property
    def consumes(self) -> bool:
        """Whether this process loads KV of others."""
        return self is not Role.PRODUCER

    @classmethod
    def _missing_(cls, value: object) -> Role | None:
        if isinstance(value, str) and value.startswith("kv_"):
            return {str(role): role for role in cls}.get(value.removeprefix("kv_"))
        return None


def role_of(value: Any) -> Role | None:
    """The role that a value names; ``None``: none was given.

    Raises:
        ConfigError: it is none, with the nearest one.
    """
    try:
        return None if value is None else Role(value)
    except ValueError:
        near = nearest(value, map(str, Role)) if isinstance(value, str) else None
        hint = f"; did you mean {near!r}?" if near else ""
        allowed = f"one of {', '.join(Role)}"
        raise ConfigError(bad_value("role", value, allowed, reason=hint, meant=near)) from None
