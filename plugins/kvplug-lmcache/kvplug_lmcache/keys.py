"""LMCache's keys and memory objects, as a store's keys and pages."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lmcache.v1.distributed.api import ObjectKey

from kvplug import UnsupportedError
from kvplug.engine import FlatPage

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

_FIELDS = tuple(field.name for field in dataclasses.fields(ObjectKey))


def encode_key(key: ObjectKey) -> bytes:
    """All that LMCache calls an object by: chunk hash, model, rank and size of the world, object group, salt.

    Fields that a later LMCache adds are in it, too, so that keys of both releases differ.

    Raises:
        UnsupportedError: a field has a value that is no text, bytes or number.
    """
    return b"".join(_encoded(name) + _encoded(getattr(key, name)) for name in _FIELDS)


def _encoded(value: Any) -> bytes:
    """Its type, its length and itself, so that two sequences of values never have the same bytes."""
    if isinstance(value, bytes):
        kind, content = b"b", value
    elif isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int):
        kind, content = b"i", b"%d" % value
    else:
        raise UnsupportedError(
            f"LMCache's ObjectKey has the fields {', '.join(_FIELDS)}, and one of them is {value!r}; this"
            " kvplug-lmcache knows text, bytes and whole numbers"
        )
    return kind + len(content).to_bytes(4, "little") + content


def encode_layout(obj: MemoryObj) -> bytes:
    """What the bytes of an object mean: dtypes and shapes, which LMCache's keys do not have."""
    meta = obj.metadata
    shapes = meta.shapes if meta.shapes is not None else [meta.shape]
    dtypes = meta.dtypes if meta.dtypes is not None else [meta.dtype]
    told = [f"{dtype} {list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=True)]
    return ", ".join(told).encode()


def page_of(key: ObjectKey, obj: MemoryObj) -> FlatPage:
    """One object as a page: as many bytes as it uses."""
    view = memoryview(obj.byte_array)
    return FlatPage(
        key=encode_key(key), view=view if view.format == "B" else view.cast("B"), layout=encode_layout(obj)
    )
