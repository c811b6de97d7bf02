"""Compares what was received with what was sent: tensors, arrays, bytes and values that contain them.

A difference is described by the first wrong byte, with dtypes and shapes, in one line. Do not compare large
tensors in an ``assert`` statement: to explain ``assert (a == b).all()``, pytest asks whether ``a`` can be
iterated over, and torch answers by making a tensor of each row of it, hundreds of bytes for each row.
"""

from __future__ import annotations

import reprlib
from typing import Any

from kvplug.net.wire import memory_of

_SHOWN = 120
"""Characters of a value that are shown."""


class UnlikeError(AssertionError):
    """What came has the form that was asked for, and is something else."""


def assert_same(wanted: Any, got: Any, what: str = "") -> None:
    """Raise an error if ``got`` differs from ``wanted``, see :func:`difference`.

    Raises:
        AssertionError: it differs; ``what`` stands first in the message.
    """
    __tracebackhide__ = True  # pytest shows the line that compares
    if wrong := difference(wanted, got):
        raise AssertionError(f"{what}: {wrong}" if what else wrong)


def assert_answer(wanted: Any, got: Any, what: str) -> None:
    """Raise an error if the tensor ``got`` differs from ``wanted``.

    Raises:
        AssertionError: in dtype or shape; ``what`` stands first in the message.
        UnlikeError: in its bytes.
    """
    form = brief(got)
    assert form == brief(wanted), f"{what}: {brief(wanted)} was expected, and {form} came"
    if wrong := difference(wanted, got):
        raise UnlikeError(f"{what}: {wrong}")


def assert_filled(value: Any, got: Any, what: str = "") -> None:
    """Raise an error unless each element of the tensor ``got`` is ``value``.

    Raises:
        AssertionError: one is not; ``what`` stands first in the message.
    """
    __tracebackhide__ = True
    assert_same(got.new_full((), value).expand(got.shape), got, what)


def brief(value: Any) -> str:
    """A short description of a value: of a tensor its dtype and shape, of long bytes their number."""
    return _brief.repr(value)


def difference(wanted: Any, got: Any, where: str = "") -> str:
    """A description of how ``got`` differs from ``wanted``; empty if it is the same.

    Tensors and arrays are the same if dtype, shape and every bit are; anything else if type and value are.
    Lists, tuples and dicts are compared item by item; ``where`` is the place of both: ``"[3]['key']"``.
    """
    at = f"at {where}, " if where else ""
    if _is_array(wanted) and _is_array(got) and _is_tensor(wanted) == _is_tensor(got):
        if (wanted.dtype, wanted.shape) == (got.dtype, got.shape):
            wrong = _other_byte(_bytes_of(wanted), _bytes_of(got))
            return f"{at}{brief(wanted)}: {wrong}" if wrong else ""
    elif type(wanted) is type(got):
        if isinstance(wanted, (bytes, bytearray)) and len(wanted) == len(got):
            wrong = _other_byte(wanted, got)
            return f"{at}{wrong}" if wrong else ""
        if isinstance(wanted, (list, tuple)) and len(wanted) == len(got):
            wanted, got = dict(enumerate(wanted)), dict(enumerate(got))
        if isinstance(wanted, dict) and wanted.keys() == got.keys():
            found = (difference(wanted[key], got[key], f"{where}[{brief(key)}]") for key in wanted)
            return next((wrong for wrong in found if wrong), "")
        if wanted == got:
            return ""
    return f"{at}{brief(wanted)} was expected, and {brief(got)} came"


def _is_array(value: Any) -> bool:
    """Whether it is an array, or a tensor."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def _bytes_of(array: Any) -> bytes:
    return bytes(memory_of(array.detach().cpu())) if _is_tensor(array) else array.tobytes()


def _other_byte(wanted: bytes | bytearray, got: bytes | bytearray) -> str:
    """The first byte in which two runs of bytes of one length differ; empty if there is none."""
    if wanted == got:
        return ""
    index = next(at for at in range(len(wanted)) if wanted[at] != got[at])
    return f"byte {index:,} of {len(wanted):,} is {got[index]:#04x}, not {wanted[index]:#04x}"


class _Brief(reprlib.Repr):
    """Short for every value, and for large tensors and bytes without formatting them whole."""

    def repr1(self, x: Any, level: int) -> str:
        if _is_array(x):
            return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        if isinstance(x, (bytes, bytearray)) and len(x) > _SHOWN // 4:
            return f"{len(x):,} bytes"
        return super().repr1(x, level)


_brief = _Brief()
_brief.maxstring = _brief.maxother = _brief.maxlong = _SHOWN
