"""Compares what was received with what was sent: tensors, arrays, bytes and values that contain them.

A difference is described by the first wrong byte, with dtypes and shapes, in one line, and with a few MiB
of memory, whatever the size of the message. Do not compare large tensors in an ``assert`` statement: to
explain ``assert (a == b).all()``, pytest asks whether ``a`` can be iterated over, and torch answers by making
a tensor of each row of it, hundreds of bytes for each row.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kvplug.net.wire import memory_of

_PART_BYTES = 1 << 20
"""Tensors are compared in parts of at most this size."""
_SHOWN = 120
"""Characters of a value that are shown."""


def difference(wanted: Any, got: Any) -> str:
    """A description of how ``got`` differs from ``wanted``; empty if it is the same.

    Tensors and arrays are the same if dtype, shape and every bit are; anything else if type and value are.
    Lists, tuples and dicts are compared item by item.
    """
    return _difference(wanted, got, "")


def assert_same(wanted: Any, got: Any, what: str = "") -> None:
    """Raise an error if ``got`` differs from ``wanted``, see :func:`difference`.

    Raises:
        AssertionError: it differs; ``what`` stands first in the message.
    """
    __tracebackhide__ = True  # pytest shows the line that compares
    if wrong := difference(wanted, got):
        raise AssertionError(f"{what}: {wrong}" if what else wrong)


def assert_filled(value: Any, got: Any, what: str = "") -> None:
    """Raise an error unless each element of the tensor ``got`` is ``value``.

    Raises:
        AssertionError: one is not; ``what`` stands first in the message.
    """
    __tracebackhide__ = True
    assert_same(filled_like(got, value), got, what)


def filled_like(tensor: Any, value: Any) -> Any:
    """A tensor with this tensor's dtype and shape whose elements are all ``value``, in the memory of one
    element.
    """
    return tensor.new_full((), value).expand(tensor.shape)


def brief(value: Any) -> str:
    """A short description of a value: of a tensor its dtype and shape, of long bytes their number."""
    return _brief.repr(value)


# -- differences -----------------------------------------------------------------------------------


def _difference(wanted: Any, got: Any, where: str) -> str:
    """``where`` is the place of both in the compared values: ``"[3]['key']"``."""
    at = f"at {where}, " if where else ""
    if (_is_tensor(wanted) and _is_tensor(got)) or (_is_array(wanted) and _is_array(got)):
        if (wanted.dtype, wanted.shape) == (got.dtype, got.shape):
            wrong = _other_byte(wanted, got)
            return f"{at}{brief(wanted)}: {wrong}" if wrong else ""
    elif type(wanted) is type(got):
        if isinstance(wanted, (bytes, bytearray)):
            wrong = _other_bytes(wanted, got)
            return f"{at}{wrong}" if wrong else ""
        if isinstance(wanted, (list, tuple)):
            return _other_item(wanted, got, where, at)
        if isinstance(wanted, dict) and wanted.keys() == got.keys():
            found = (_difference(wanted[key], got[key], f"{where}[{brief(key)}]") for key in wanted)
            return next((wrong for wrong in found if wrong), "")
        if wanted == got:
            return ""
    return f"{at}{brief(wanted)} was expected, and {brief(got)} came"


def _other_item(wanted: Sequence[Any], got: Sequence[Any], where: str, at: str) -> str:
    for index, (ours, theirs) in enumerate(zip(wanted, got, strict=False)):
        if wrong := _difference(ours, theirs, f"{where}[{index}]"):
            return wrong
    same = len(wanted) == len(got)
    return "" if same else f"{at}{len(wanted):,} items were expected, and {len(got):,} came"


def _other_bytes(wanted: bytes | bytearray, got: bytes | bytearray) -> str:
    if len(wanted) != len(got):
        return f"{len(wanted):,} bytes were expected, and {len(got):,} came"
    return "" if wanted == got else _byte(wanted, got, 0, len(wanted))


def _other_byte(wanted: Any, got: Any) -> str:
    """Of two tensors or arrays with one dtype and shape."""
    before = 0
    for ours, theirs in zip(_parts(wanted, wanted.nbytes), _parts(got, got.nbytes), strict=True):
        one, other = _bytes_of(ours), _bytes_of(theirs)
        if one != other:
            index = before + (within := _first(one, other))
            values = _values(ours, theirs, within // wanted.itemsize)
            return _byte(one, other, before, wanted.nbytes) + _element(wanted, index) + values
        before += len(one)
    return ""


def _parts(tensor: Any, nbytes: int) -> Iterator[Any]:
    """Parts of a tensor or array of at most :data:`_PART_BYTES`, in the order of its elements.

    To read the bytes of what is not contiguous takes a copy, which is then a copy of one part.
    """
    if nbytes <= _PART_BYTES or not tensor.ndim:
        yield tensor
        return
    rows = len(tensor)
    row_bytes = nbytes // rows
    if row_bytes > _PART_BYTES:
        for row in range(rows):
            yield from _parts(tensor[row], row_bytes)
    else:
        step = _PART_BYTES // row_bytes
        for start in range(0, rows, step):
            yield tensor[start : start + step]


def _bytes_of(part: Any) -> bytes:
    return part.tobytes() if _is_array(part) else bytes(memory_of(part.detach().cpu()))


def _byte(one: bytes | bytearray, other: bytes | bytearray, before: int, nbytes: int) -> str:
    """The first byte in which two runs of bytes differ, after ``before`` others of ``nbytes`` in all."""
    index = _first(one, other)
    return f"byte {before + index:,} of {nbytes:,} is {other[index]:#04x}, not {one[index]:#04x}"


def _first(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """The index of the first byte in which two runs of one length, which are not equal, differ."""
    low, high = 0, len(one)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] != other[low:middle]:
            high = middle
        else:
            low = middle
    return low


def _element(tensor: Any, byte: int) -> str:
    """Where the element of a byte is, unless the number of the byte says it."""
    if tensor.ndim < 2 and tensor.itemsize == 1:
        return ""
    index, indices = byte // tensor.itemsize, list[int]()
    for size in reversed(tensor.shape):
        index, within = divmod(index, size)
        indices.insert(0, within)
    return f", in the element {indices}"


def _values(ours: Any, theirs: Any, index: int) -> str:
    """The values of an element, for dtypes that have them."""
    try:
        one, other = (each.reshape(-1)[index].item() for each in (ours, theirs))
    except (RuntimeError, NotImplementedError):
        return ""
    return f": {other!r}, not {one!r}"


# -- values ----------------------------------------------------------------------------------------


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


class _Brief(reprlib.Repr):
    """Short for every value, and for large tensors and bytes without formatting them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _SHOWN

    def repr1(self, x: Any, level: int) -> str:
        if _is_tensor(x):
            return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        if _is_array(x):
            return f"array of {x.dtype} {list(x.shape)}"
        if isinstance(x, (bytes, bytearray)) and len(x) > _SHOWN // 4:
            return f"{len(x):,} bytes"
        return super().repr1(x, level)


_brief = _Brief()
