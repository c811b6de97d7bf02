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
    """Encode all fields of LMCache's key: chunk hash, model, rank and world size, object group, salt.

    This includes fields that a later LMCache adds, so that keys of both releases differ.

    Raises:
        UnsupportedError: a field's value is not text, bytes or a whole number.
    """
    return b"".join(_encoded(name) + _encoded(getattr(key, name)) for name in _FIELDS)


def _encoded(value: Any) -> bytes:
    """The value's type, length and content, so that two sequences of values never have the same bytes."""
    if isinstance(value, bytes):
        kind, content = b"b", value
    elif isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int):
        kind, content = b"i", b"%d" % value
    else:
        raise UnsupportedError(
            f"LMCache's ObjectKey has the fields {', '.join(_FIELDS)}, and one of them is {value!r}; this"
            " kvplug-lmcache supports only text, bytes and whole numbers"
        )
    return kind + len(content).to_bytes(4, "little") + content


def encode_layout(obj: MemoryObj) -> bytes:
    """The dtypes and shapes of an object's bytes, which LMCache's keys do not contain."""
    meta = obj.metadata
    shapes = meta.shapes if meta.shapes is not None else [meta.shape]
    dtypes = meta.dtypes if meta.dtypes is not None else [meta.dtype]
    parts = [f"{dtype} {list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=True)]
    return ", ".join(parts).encode()


def page_of(key: ObjectKey, obj: MemoryObj) -> FlatPage:
    """One object as a page, with the bytes that it uses."""
    view = memoryview(obj.byte_array)
    return FlatPage(
        key=encode_key(key), view=view if view.format == "B" else view.cast("B"), layout=encode_layout(obj)
    )
