"""The compiled steps of a ring (ring.c), if they were built with this package. They are optional."""

from __future__ import annotations

import ctypes
import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from kvplug.transport import NamedExhaustion

logger = logging.getLogger(__name__)

_FILE: Final = Path(__file__).with_name("_ring.so")
_SOURCE: Final = Path(__file__).with_name("ring.c")

_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64
MAX_AXES: Final = 4
"""Of the runs of a row, as in ring.c."""
_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    # name: (what it returns, its arguments)
    "kvplug_publish": (None, _POINTER, _I64),
    "kvplug_release": (None, _POINTER, _I64),
    "kvplug_spin_for_units": (ctypes.c_int, _POINTER, _I64, _I64),
    "kvplug_poll": (ctypes.c_int, _POINTER, _I64, _I64, _I64),
    "kvplug_spin_for_room": (ctypes.c_int, _POINTER, _I64, _I64),
    "kvplug_put": (ctypes.c_int, _POINTER, _POINTER, _POINTER, _I64),
    "kvplug_put_long": (ctypes.c_int, _POINTER, _POINTER, _POINTER, _I64, _I64, _I64),
    "kvplug_peek": (_I64, _POINTER, _POINTER, _I64),
    "kvplug_take": (None, _POINTER, _POINTER, _I64),
    "kvplug_push": (_I64, _POINTER, ctypes.c_char_p, _I64, _POINTER, *[_I64] * 6),
    "kvplug_copy_one_of": (None, _POINTER, _POINTER, _I64, _I64),
    "kvplug_pull": (_I64, _POINTER, _POINTER, *[_I64] * 7),
}


class EndStruct(ctypes.Structure):
    """``struct end`` of ring.c."""

    _fields_ = (
        ("words", _POINTER),
        ("bytes", _POINTER),
        ("places", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("readers", _I64),
    )


class MessageStruct(ctypes.Structure):
    """``struct message`` of ring.c."""

    _fields_ = (
        ("prefix", ctypes.c_char_p),
        ("prefix_bytes", _I64),
        ("nbytes", _I64),
        ("cost", _I64),
    )


class SpanStruct(ctypes.Structure):
    """``struct span`` of ring.c."""

    _fields_ = (
        ("flat", _POINTER),
        ("bases", _POINTER),
        ("strides", _POINTER),
        ("ids", _POINTER),
        ("num_ids", _I64),
        ("num_parts", _I64),
        ("row_bytes", _I64),
        ("run_bytes", _I64),
        ("num_axes", _I64),
        ("slowest", _I64),
        ("counts", _I64 * MAX_AXES),
        ("steps", _I64 * MAX_AXES),
        ("in_message", _I64 * MAX_AXES),
    )


@attrs.frozen
class Library:
    """The functions of ring.c, twice: those that keep the interpreter's lock have the smaller fixed cost."""

    publish: Callable[..., None]
    release: Callable[..., None]
    put: Callable[..., int]
    peek: Callable[..., int]
    take: Callable[..., None]
    push: Callable[..., int]
    pull: Callable[..., int]
    # These release the interpreter's lock.
    spin_for_units: Callable[..., int]
    spin_for_room: Callable[..., int]
    poll: Callable[..., int]
    long_peek: Callable[..., int]
    long_put: Callable[..., int]
    long_push: Callable[..., int]
    long_pull: Callable[..., int]
    copy_one_of: Callable[..., None]


class _UnusableError(Exception):
    """The compiled steps are there and cannot be used."""


def library() -> Library | None:
    """``None``: it was not built, or cannot be loaded here, which is logged.

    Raises:
        ResourceExhaustedError: the process has no free descriptor or memory to load it.
    """
    try:
        return _loaded() if _FILE.exists() else None
    except (OSError, AttributeError, _UnusableError) as e:
        NamedExhaustion.check(e, f"loading {_FILE}")
        logger.warning("%s cannot be used (%s); using Python instead", _FILE, e)
        return None


@functools.cache  # of what it returns; what it raises is not kept
def _loaded() -> Library:
    keeps, lets_go = ctypes.PyDLL(str(_FILE)), ctypes.CDLL(str(_FILE))
    if keeps.kvplug_source() & 0xFFFFFFFF != zlib.crc32(_SOURCE.read_bytes()):
        raise _UnusableError("it was built from another ring.c")
    kept = ("publish", "release", "put", "peek", "take", "push", "pull")
    return Library(
        **{name: _function(keeps, name) for name in kept},
        spin_for_units=_function(lets_go, "spin_for_units"),
        spin_for_room=_function(lets_go, "spin_for_room"),
        poll=_function(lets_go, "poll"),
        long_peek=_function(lets_go, "peek"),
        long_put=_function(lets_go, "put_long"),
        long_push=_function(lets_go, "push"),
        long_pull=_function(lets_go, "pull"),
        copy_one_of=_function(lets_go, "copy_one_of"),
    )


def _function(library: ctypes.CDLL, name: str) -> Any:
    name = f"kvplug_{name}"
    function = library[name]
    function.restype, *function.argtypes = _PROTOTYPES[name]
    return function
