"""Records: messages that are attrs classes, sent as plain values, which msgspec converts back into the class.

Types are checked. Bounds are checked if a field declares them (``Annotated[int, msgspec.Meta(ge=1)]``) or the
class checks them in ``__attrs_post_init__``. Unknown fields are ignored, because a newer minor version may
have added them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import msgspec

from kvplug.errors import KvplugError, WireError
from kvplug.net.peer_text import peer_text

T = TypeVar("T", bound=attrs.AttrsInstance)


def to_plain(record: attrs.AttrsInstance) -> Any:
    """Return a record as plain values for :func:`~kvplug.net.wire.encode`: nested dicts."""
    # msgspec would treat cached properties as fields.
    return msgspec.to_builtins(attrs.asdict(record), builtin_types=(bytes,), enc_hook=_as_dict)


def from_plain(plain: object, kind: type[T], name: str, error: type[KvplugError] = WireError) -> T:
    """Rebuild a record from :func:`to_plain`'s values. Runs its converters and validators, but not those of
    inner records.

    Args:
        name: The message's name, for the error.

    Raises:
        KvplugError: of class ``error``: a field is missing, of the wrong type or out of bounds. Names the
            field.
    """
    try:
        found = msgspec.convert(plain, kind, builtin_types=(bytes,))
        return attrs.evolve(found) if _has_hooks(kind) else found  # type: ignore[misc]
    # ValidationError is a ValueError only in newer releases of msgspec.
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as e:
        fault, _, path = str(e).partition(" - at `$")
        raise error(f"{name}{path.rstrip('`')}: {peer_text(fault)}") from e


@functools.cache
def _has_hooks(kind: type[attrs.AttrsInstance]) -> bool:
    """Whether attrs runs converters or validators, which msgspec does not."""
    return any(field.converter or field.validator for field in attrs.fields(kind))


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a record cannot hold a value of type {type(value).__name__}")
