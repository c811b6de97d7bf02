"""What a numpy array's bytes mean, and those bytes.

numpy is imported only where there is an array already, or one must be made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplug.errors import UnsupportedError, WireError
from kvplug.net.exhaustion import raise_if_exhausted
from kvplug.net.wire.tensors import TensorMeta

if TYPE_CHECKING:
    from numpy import ndarray

DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "complex64", "complex128"}
)
"""numpy's names that are also torch's."""


def parts_of(array: ndarray[Any, Any]) -> tuple[TensorMeta, memoryview]:
    """What an array's bytes mean, and those bytes in row-major order, read-only.

    Not a copy, unless they do not lie in that order.

    Raises:
        UnsupportedError: a dtype that is not carried, or more than 64 dimensions.
    """
    import numpy

    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise UnsupportedError(
            f"a numpy array of dtype {array.dtype} is not carried; these are, in the machine's byte order: "
            + ", ".join(sorted(DTYPES))
        )
    meta = TensorMeta(array.dtype.name, array.shape)
    flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return meta, memoryview(flat).toreadonly()


def array_of(meta: TensorMeta, flat: memoryview) -> ndarray[Any, Any]:
    """A new array of those bytes.

    Raises:
        WireError: numpy has no such dtype or refuses the shape, or is not installed.
    """
    if meta.dtype not in DTYPES:
        raise WireError(f"numpy has no dtype {meta.dtype}")
    try:
        import numpy
    except ImportError as e:
        raise_if_exhausted(e, "importing numpy")
        raise WireError(f"a numpy array came, and numpy is not installed here: {e}") from e
    try:
        array: ndarray[Any, Any] = numpy.frombuffer(flat, dtype=meta.dtype).reshape(meta.shape).copy()
    except ValueError as e:
        raise WireError(f"numpy refuses an array of shape {meta.shape}: {e}") from e
    return array
