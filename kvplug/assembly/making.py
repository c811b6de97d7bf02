"""Calls the factories of plugins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvplug.errors import KvplugError, PluginError
from kvplug.net.exhaustion import exhaustion_of

_T = TypeVar("_T")


def made(called: str, wanted: type[_T], factory: Callable[..., Any], *arguments: Any) -> _T:
    """What a factory makes of these arguments. ``called``: how messages call the offer.

    Raises:
        PluginError: it raised an exception that is not kvplug's, or made something else.
        KvplugError, OSError, MemoryError: as the factory raised it; the last two where something ran out.
    """
    try:
        found = factory(*arguments)
    except KvplugError:
        raise
    except Exception as e:
        if exhaustion_of(e) is not None:
            raise
        raise PluginError(f"{called} cannot be made: {type(e).__name__}: {e}") from e
    if not isinstance(found, wanted):
        raise PluginError(f"{called} made {found!r}, which is no {wanted.__name__}; subclass it")
    return found
