"""Records: messages as attrs classes, plain values on the wire, which msgspec turns back into the class.

Types are checked. Bounds are, too, where a field has some (``Annotated[int, msgspec.Meta(ge=1)]``) or the
class checks them in ``__attrs_post_init__``. Fields that a class does not have are ignored: a newer minor
version may have added them.
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
    """A record as plain values, for :func:`encode`: a dict, and dicts within it."""
    # msgspec would take cached properties for fields.
    return msgspec.to_builtins(attrs.asdict(record), builtin_types=(bytes,), enc_hook=_as_dict)


def from_plain(plain: object, kind: type[T], name: str, error: type[KvplugError] = WireError) -> T:
    """The record that :func:`to_plain` described. Its converters and validators run, not those of inner ones.

    Args:
        name: Of the message, for the error.

    Raises:
        KvplugError: of class ``error``: a field is missing, has another type or is out of bounds; names it.
    """
    try:
        found = msgspec.convert(plain, kind, builtin_types=(bytes,))
        return attrs.evolve(found) if _has_hooks(kind) else found  # type: ignore[misc]
    # Only newer releases of msgspec have a ValidationError that is a ValueError.
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
    raise TypeError(f"{type(value).__name__} is not a value of a record")
