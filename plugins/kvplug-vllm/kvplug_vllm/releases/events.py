"""Events of stored and removed blocks: they have the field ``ownership`` since 0.29."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def event_of(kind: Any, owner: str, **fields: Any) -> Any:
    """An event of vLLM's class ``kind``, with its owner if the class has that field.

    A dropped owner is logged, once for each class.
    """
    if "ownership" in getattr(kind, "__struct_fields__", ()):
        return kind(**fields, ownership=owner or None)
    if owner and kind.__name__ not in _warned:
        _warned.add(kind.__name__)
        _log.warning("vLLM's %s has no field for an owner: its events omit the owner", kind.__name__)
    return kind(**fields)
