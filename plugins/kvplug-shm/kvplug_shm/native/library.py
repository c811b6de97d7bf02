"""The compiled steps of a ring (ring.c), which are built with this package."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvplug import TransportError
from kvplug.transport import NamedExhaustion

_FILE: Final = Path(__file__).with_name("_ring.so")
_SOURCE: Final = Path(__file__).with_name("ring.c")

_POINTER, _INT, _I64, _U64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
MAX_AXES: Final = 4
"""Of the runs of a row, as in ring.c."""
LONGEST_NS: Final = 5_000_000
"""The longest single call that does not sleep: after it deadlines are checked and signals handled."""
_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    # name: (what it returns, its arguments)
    "load": (_U64, _POINTER, _I64),
    "store": (None, _POINTER, _I64, _U64),
    "wait": (None, _POINTER, _I64, _U64, _I64),
    "wake": (None, _POINTER, _I64),
    "publish": (None, _POINTER, _I64),
    "release": (None, _POINTER, _I64),
    "end_writing": (None, _POINTER),
    "end_reading": (None, _POINTER),
    "evict": (None, _POINTER, _I64),
    "evict_writer": (None, _POINTER),
    "evicted": (_INT, _POINTER),
    "room": (_I64, _POINTER),
    "available": (_I64, _POINTER),
    "gap": (_I64, _POINTER),
    "unread": (_I64, _POINTER),
    "blocked_on": (_I64, _POINTER, _I64, _POINTER),
    "poll_room": (_INT, _POINTER, _I64, _I64, _I64),
    "poll_units": (_INT, _POINTER, _I64, _I64, _I64),
    "copy_one_of": (None, _POINTER, _POINTER, _I64, _I64),
    "put": (_INT, _POINTER, _POINTER, _POINTER, _I64),
    "peek": (_I64, _POINTER, _POINTER, _I64),
    "take": (None, _POINTER, _POINTER, _I64),
    "push": (_I64, _POINTER, ctypes.c_char_p, _I64, _POINTER, *[_I64] * 4),
    "pull": (_I64, _POINTER, _POINTER, *[_I64] * 6),
}
_RELEASE_THE_LOCK: Final = frozenset(
    {"wait", "poll_room", "poll_units", "copy_one_of", "long_put", "long_peek", "long_push", "long_pull"}
)
"""Functions that let other threads of the interpreter run. The others have the smaller fixed cost; some are
there twice."""


class EndStruct(ctypes.Structure):
    """``struct end`` of ring.c."""

    _fields_ = (
        ("words", _POINTER),
        ("bytes", _POINTER),
        ("places", _U64),
        ("count", _U64),
        ("readers", _I64),
        ("at_once", _I64),
        ("smallest", _I64),
        ("largest", _I64),
        ("window", _U64),
        ("least_window", _U64),
        ("jump", _U64),
        ("calm_laps", _U64),
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


class Library:
    """The functions of ring.c."""

    def __init__(self, file: Path, source: Path) -> None:
        """Raises TransportError: it cannot be used here; says why."""
        try:
            keeps, releases = ctypes.PyDLL(str(file)), ctypes.CDLL(str(file))
            if keeps.kvplug_source() & 0xFFFFFFFF != zlib.crc32(source.read_bytes()):
                raise TransportError(f"{file} was built from another {source.name}; install kvplug-shm again")
            for name in {*_PROTOTYPES, *_RELEASE_THE_LOCK}:
                short = name.removeprefix("long_")
                function = (releases if name in _RELEASE_THE_LOCK else keeps)[f"kvplug_{short}"]
                function.restype, *function.argtypes = _PROTOTYPES[short]
                setattr(self, name, function)
        except (OSError, AttributeError) as e:
            NamedExhaustion.check(e, f"loading {file}")
            raise TransportError(f"{file} cannot be loaded: {e}") from e

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Of a name that is no function of ring.c."""
        raise AttributeError(name)


@functools.cache  # of what it returns; what it raises is not kept
def library() -> Library:
    """The compiled steps.

    Raises:
        TransportError: they were not built, or cannot be used here; says why.
        ResourceExhaustedError: the process has no free descriptor or memory to load them.
    """
    if not _FILE.exists():
        raise TransportError(
            'the transports "shm" need compiled code, and this kvplug-shm has none: install a wheel for this'
            " platform, or a C compiler (CC, else cc) and kvplug-shm again"
        )
    return Library(_FILE, _SOURCE)


def in_ns(seconds: float) -> int:
    """As the compiled steps count."""
    return int(min(seconds, 1e6) * 1e9)
