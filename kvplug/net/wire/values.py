"""Plain values as msgpack, with their exact types, within bounds, and nothing else.

Carried: None, bool, int (-2**63 to 2**64 - 1), float, str, bytes, list, tuple, set, frozenset, dict,
torch.dtype, CPU tensors and numpy arrays; subclasses of these are not, since they would come out as
something else. What msgpack has no type for is tagged by an extension (the table is in
``docs/reference/wire.md``): a tuple is an array whose first element is the mark "tuple", which no value
can be.

Received bytes are validated first (:mod:`kvplug.net.wire.validate`); only valid ones reach msgspec.

For a transport that can put a tensor's bytes where the other end reads them, these bytes can stay *out of
band*: a value is then a small head, and memories that are not copied first. The head is the same encoding, in
which a tensor or array that is out of band is an extension of its own with its meta alone. The head does not
say where its bytes are: the memories come in the order of the head, each at the next multiple of
:data:`ALIGNMENT`.

torch and numpy are imported only where there is a tensor or array already, or one must be made.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvplug.errors import CapacityError, UnsupportedError, WireError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.wire import tensors
from kvplug.net.wire.copying import CopyBytes, copy_bytes
from kvplug.net.wire.validate import DEFAULT_LIMITS, MARKS, Leaf, Limits, Mark, validate

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

Buffer = bytes | bytearray | memoryview

ALIGNMENT: Final = 64
"""Each memory out of band begins at a multiple of it: a cache line's length, and enough for every dtype."""
MIN_BYTES: Final = 4096
"""A smaller tensor costs less inside the head."""

_CARRIED: Final = (
    "None, bool, int of 64 bits, float, str, bytes, list, tuple, set, frozenset, dict, torch.dtype,"
    " CPU tensor, numpy array"
)
_AS_THEY_ARE: Final = frozenset({type(None), bool, int, float, str, bytes})
"""msgspec writes them, and no other type, as they are, also as the keys of a dict."""
_MARKS: Final[dict[type, Mark | None]] = {
    list: None,
    tuple: Mark.TUPLE,
    set: Mark.SET,
    frozenset: Mark.FROZENSET,
    dict: Mark.DICT,
}
_MARK_EXT: Final = {mark: msgspec.msgpack.Ext(int(mark), b"") for mark in Mark}
_ARRAY_DTYPES: Final = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "complex64", "complex128"}
)
"""numpy's names that are also torch's."""
_OUT_OF_BAND: Final = {Leaf.TENSOR: Leaf.TENSOR_OUT_OF_BAND, Leaf.ARRAY: Leaf.ARRAY_OUT_OF_BAND}
_ARRAYS: Final = (Leaf.ARRAY, Leaf.ARRAY_OUT_OF_BAND)


class OutOfBand(NamedTuple):
    """A value in two parts. The memories are those of its tensors, so they must not be written meanwhile."""

    head: bytes
    """The value without its tensors' bytes."""
    memories: list[memoryview]
    """Flat bytes, in the order in which :func:`decode_out_of_band` wants them."""

    @property
    def nbytes(self) -> int:
        """What the memories take back to back, each of them :func:`aligned`."""
        return sum(aligned(memory.nbytes) for memory in self.memories)


def aligned(nbytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`: what a memory of ``nbytes`` takes among others."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# -- encoding --------------------------------------------------------------------------------------


def encode(value: object, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The bytes of ``value``.

    Raises:
        UnsupportedError: something in it is not carried; the message names the path, the type and what is.
        CapacityError: it is deeper, has more elements or more bytes than ``limits`` allow, so that the
            peer would refuse it.
        ResourceExhaustedError: there is no memory for them.
    """
    return _encode(value, limits, _WITHIN)


def encode_out_of_band(
    value: object, *, min_bytes: int = MIN_BYTES, limits: Limits = DEFAULT_LIMITS
) -> OutOfBand:
    """``value`` as a head and the memories of its tensors and arrays of at least ``min_bytes``.

    No byte of them is copied, unless a tensor or array is not contiguous. Raises as :func:`encode`; the bound
    of bytes is for head and memories together.
    """
    leaves = _Leaves(min_bytes)
    return OutOfBand(_encode(value, limits, leaves), leaves.memories)


def _encode(value: object, limits: Limits, leaves: _Leaves) -> bytes:
    try:
        plain = type(value) in _AS_THEY_ARE
        data = _pack(value if plain else _lowered(value, limits.max_depth, [limits.max_items], leaves))
    except (UnsupportedError, UnicodeEncodeError, OverflowError) as e:
        raise _with_path(value, limits.max_depth, e) from e
    except (MemoryError, RuntimeError) as e:
        NamedExhaustion.check(e, "encoding a value")
        raise
    nbytes = len(data)
    for memory in leaves.memories:
        nbytes += memory.nbytes
    if nbytes > limits.max_bytes:
        raise CapacityError(f"the value takes {nbytes} bytes, and at most {limits.max_bytes} are sent")
    return data


def _lowered(value: Any, depth: int, room: list[int], leaves: _Leaves) -> Any:
    """What msgspec writes for ``value``: only types of its own, and marks. ``room``: elements allowed."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind not in _MARKS:
        return leaves.extension_of(value)
    if depth == 0:
        raise CapacityError("the value is nested too deeply to be sent (or contains itself)")
    mark = _MARKS[kind]
    if kind is dict and _AS_THEY_ARE.issuperset(map(type, value)):
        mark = None
    room[0] -= len(value) * (2 if kind is dict else 1) + (mark is not None)  # a mark is an element too
    if room[0] < 0:
        raise CapacityError("the value has too many elements to be sent")
    if kind is dict and mark is None:
        return {
            k: v if type(v) in _AS_THEY_ARE else _lowered(v, depth - 1, room, leaves)
            for k, v in value.items()
        }
    items = list(chain.from_iterable(value.items()) if kind is dict else value)
    if not _AS_THEY_ARE.issuperset(map(type, items)):
        items = [
            item if type(item) in _AS_THEY_ARE else _lowered(item, depth - 1, room, leaves) for item in items
        ]
    if mark is not None:
        items.insert(0, _MARK_EXT[mark])
    return items


class _Leaves:
    """Writes dtypes, tensors and arrays; those of at least ``min_bytes`` without their memories."""

    __slots__ = ("memories", "_min_bytes")

    def __init__(self, min_bytes: int) -> None:
        self.memories: list[memoryview] = []
        self._min_bytes = min_bytes

    def extension_of(self, value: Any) -> msgspec.msgpack.Ext:
        """Raises UnsupportedError: it is not carried."""
        torch = sys.modules.get("torch")
        # An import under way in another thread shows a module without its names: nothing is a tensor yet.
        if torch is not None and hasattr(torch, "Tensor") and hasattr(torch, "dtype"):
            if isinstance(value, torch.dtype):
                name = tensors.dtype_name(value)
                if name in tensors.DTYPES:
                    return msgspec.msgpack.Ext(int(Leaf.DTYPE), bytes([tensors.DTYPES[name][0]]))
                raise UnsupportedError(f"the dtype {value} is not carried")
            if type(value) is torch.Tensor:
                return self._extension(Leaf.TENSOR, tensors.meta_of(value), tensors.memory_of(value))
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "ndarray") and type(value) is numpy.ndarray:
            if value.dtype.name not in _ARRAY_DTYPES or not value.dtype.isnative:
                raise UnsupportedError(
                    f"a numpy array of dtype {value.dtype} is not carried; these are, in the machine's byte"
                    f" order: {', '.join(sorted(_ARRAY_DTYPES))}"
                )
            flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
            meta = tensors.TensorMeta(value.dtype.name, value.shape)
            return self._extension(Leaf.ARRAY, meta, memoryview(flat).toreadonly())
        kind = type(value)
        where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise UnsupportedError(f"a {where}{kind.__qualname__} is not carried")

    def _extension(self, leaf: Leaf, meta: tensors.TensorMeta, memory: memoryview) -> msgspec.msgpack.Ext:
        if memory.nbytes < self._min_bytes:
            return msgspec.msgpack.Ext(int(leaf), b"".join((tensors.encode_meta(meta), memory)))
        self.memories.append(memory)
        return msgspec.msgpack.Ext(int(_OUT_OF_BAND[leaf]), tensors.encode_meta(meta))


_WITHIN: Final = _Leaves(sys.maxsize)
"""Writes all of them with their memories, so it keeps none."""
_encoder: Final = msgspec.msgpack.Encoder()
_LARGE_BYTES: Final = 64 << 10
_MOST_LOOKED_AT: Final = 16


def _pack(value: Any) -> bytes:
    """What msgspec writes for a value of :func:`_lowered`.

    ``Encoder.encode`` enlarges its memory as it goes, and crashes the process where there is no more
    (msgspec 0.22). So a value that is seen to be large is written into memory that was taken before.

    Raises:
        MemoryError: there is not that much.
    """
    nbytes = _large_nbytes(value)
    if not nbytes:
        return _encoder.encode(value)
    memory = bytearray(nbytes + _LARGE_BYTES)
    _encoder.encode_into(value, memory)
    return bytes(memory)


def _large_nbytes(value: Any) -> int:
    """Bytes of the large byte strings and texts in a value, and in its elements if they are few."""
    kind = type(value)
    if kind is list or kind is dict:
        items = value if kind is list else value.values()
        return sum(map(_large_nbytes, items)) if len(items) <= _MOST_LOOKED_AT else 0
    if kind is bytes:
        nbytes = len(value)
    elif kind is str:
        nbytes = 4 * len(value)
    elif kind is msgspec.msgpack.Ext:
        nbytes = len(value.data)
    else:
        return 0
    return nbytes if nbytes > _LARGE_BYTES else 0


def _with_path(value: object, depth: int, error: Exception) -> UnsupportedError:
    """``error`` with the path to the value that caused it. Slow, and only called for a refusal."""
    for path, item in _walk(value, "value", depth):
        try:
            _pack(_lowered(item, 0, [0], _Leaves(0)))
        except UnsupportedError as e:
            return UnsupportedError(f"{path}: {e}; carried are: {_CARRIED}")
        except UnicodeEncodeError as e:
            return UnsupportedError(f"{path}: a str with a lone surrogate has no UTF-8: {e}")
        except OverflowError:
            return UnsupportedError(f"{path}: an integer of {item.bit_length()} bits does not fit into 64")
    return UnsupportedError(f"value: {error}")  # changed by another thread meanwhile


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Everything in ``value`` that is no container, with its path."""
    kind = type(value)
    if kind not in _MARKS:
        yield path, value
    elif depth >= 0 and kind is dict:
        for k, v in value.items():
            yield from _walk(k, f"{path}, key {_short(k)}", depth - 1)
            yield from _walk(v, f"{path}[{_short(k)}]", depth - 1)
    elif depth >= 0:
        for i, item in enumerate(value):
            step = f"[{i}]" if kind is list or kind is tuple else f", member {_short(item)}"
            yield from _walk(item, path + step, depth - 1)


def _short(key: object) -> str:
    text = ascii(key) if type(key) in _AS_THEY_ARE else f"of type {type(key).__qualname__}"
    return text if len(text) <= 60 else text[:57] + "..."


# -- decoding --------------------------------------------------------------------------------------


def decode(buf: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The value that ``buf`` is the encoding of. A key that comes twice in a dict counts once, the last.

    Raises:
        WireError: the bytes are not such an encoding, go beyond ``limits``, or hold a tensor, dtype or
            array while torch or numpy is not installed. No more memory is taken than
            ``limits.memory_bound(len(buf))`` (besides importing torch).
        ResourceExhaustedError: there is not that much. Nothing else is raised, whatever the bytes.
    """
    return _decode(buf, None, limits, tensors.empty_like_meta, copy_bytes)


def decode_out_of_band(
    head: Buffer,
    memories: memoryview,
    *,
    limits: Limits = DEFAULT_LIMITS,
    make: Callable[[tensors.TensorMeta], Tensor] | None = None,
    copy: CopyBytes = copy_bytes,
) -> Any:
    """The value of a head and its memories, which lie back to back, each of them :func:`aligned`.

    What is out of band is copied out, a tensor into what ``make`` returns for its meta: one of that dtype and
    shape. Without it, for numpy arrays always, and for what lies in the head, memory is taken anew.
    ``copy(target, source)`` copies the bytes of such a tensor.

    Raises:
        WireError: the bytes are not such a head, go beyond ``limits``, want other memories than these, or
            hold a tensor, dtype or array while torch or numpy is not installed. Nothing else is raised,
            whatever the bytes, but what ``make`` raises; and no more memory is taken than
            ``limits.memory_bound`` of head and memories together (besides importing torch, and by ``make``).
        ResourceExhaustedError: there is not that much.
    """
    return _decode(head, memories, limits, make or tensors.empty_like_meta, copy)


def _decode(
    buf: Buffer,
    memories: memoryview | None,
    limits: Limits,
    make: Callable[[tensors.TensorMeta], Tensor],
    copy: CopyBytes,
) -> Any:
    nbytes = buf.nbytes if isinstance(buf, memoryview) else len(buf)
    if nbytes > limits.max_bytes:
        raise WireError(f"a value of {nbytes} bytes; at most {limits.max_bytes} are accepted")
    try:
        data = bytes(buf)  # a private copy: shared memory could change between the check and the use
        if memories is None:
            marked = validate(data, limits)
            value = _unpack(data)
        else:
            checked = _checked_short if nbytes <= _SHORT_BYTES else _checked
            marked, metas, wanted, lying = checked(data, limits)
            most = limits.max_bytes - nbytes
            if wanted > most:
                raise WireError(f"a value whose tensors have {wanted} bytes; at most {most} are accepted")
            if lying != memories.nbytes:
                raise WireError(
                    f"the value's {len(metas)} memories take {lying} bytes, and {memories.nbytes} came"
                )
            extension = _OutOfBandExtension(metas, memories.cast("B"), make, copy) if metas else _extension
            value = msgspec.msgpack.decode(data, ext_hook=extension)
        return _resolved(value) if marked else value
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as e:
        raise WireError(f"not the bytes of a value: {e}") from e
    except (MemoryError, UnsupportedError, RuntimeError) as e:
        NamedExhaustion.check(e, f"decoding a value of {nbytes + (memories.nbytes if memories else 0)} bytes")
        if isinstance(e, MemoryError):
            raise
        raise WireError(f"a tensor or dtype cannot be made here: {e}") from e


def _checked(data: bytes, limits: Limits) -> tuple[bool, tuple[tensors.TensorMeta, ...], int, int]:
    """Whether a head holds marked arrays, the tensors that are out of band, their bytes, and those that they
    take with the gaps between them.

    Raises:
        WireError: it is no head.
    """
    spans: list[slice] = []
    marked = validate(data, limits, spans)
    metas = tuple(tensors.decode_meta(data[span]) for span in spans)
    sizes = [meta.nbytes for meta in metas]
    return marked, metas, sum(sizes), sum(map(aligned, sizes))


_SHORT_BYTES: Final = 256
_checked_short = functools.lru_cache(maxsize=64)(_checked)
"""Many messages of a stream have the same head."""


def _extension(code: int, payload: memoryview) -> Any:
    """What an extension that passed :func:`validate` stands for; called by msgspec."""
    if not payload.nbytes:
        return MARKS[code]
    # msgspec 0.19 gives the view the shape of the whole message, so that slices of it reach past the end
    # of memory (its issue 835); a cast makes the shape anew from the number of bytes, which is right.
    payload = payload.cast("B")
    if code == Leaf.DTYPE:
        return tensors.dtype_of(tensors.name_of_code(payload[0]))
    meta, flat = tensors.split_meta(payload)
    if meta.nbytes != flat.nbytes:
        raise WireError(
            f"a {meta.dtype} tensor of shape {meta.shape} has {meta.nbytes} bytes, not {flat.nbytes}"
        )
    return _built(code, meta, flat, tensors.empty_like_meta, copy_bytes)


class _OutOfBandExtension:
    """The same in a head, whose extensions msgspec meets in the order in which their memories lie."""

    def __init__(
        self,
        metas: tuple[tensors.TensorMeta, ...],
        memories: memoryview,
        make: Callable[[tensors.TensorMeta], Tensor],
        copy: CopyBytes,
    ) -> None:
        self._metas, self._memories = iter(metas), memories
        self._make, self._copy = make, copy

    def __call__(self, code: int, payload: memoryview) -> Any:
        if code not in (Leaf.TENSOR_OUT_OF_BAND, Leaf.ARRAY_OUT_OF_BAND):
            return _extension(code, payload)
        meta = next(self._metas)
        flat, self._memories = self._memories[: meta.nbytes], self._memories[aligned(meta.nbytes) :]
        return _built(code, meta, flat, self._make, self._copy)


def _built(
    code: int,
    meta: tensors.TensorMeta,
    flat: memoryview,
    make: Callable[[tensors.TensorMeta], Tensor],
    copy: CopyBytes,
) -> Tensor | ndarray[Any, Any]:
    """The tensor or array of those bytes. The caller has checked that there are as many as there must be."""
    if code not in _ARRAYS:
        tensor = make(meta)
        tensors.copy_into(tensor, flat, copy)
        return tensor
    if meta.dtype not in _ARRAY_DTYPES:
        raise WireError(f"numpy has no dtype {meta.dtype}")
    try:
        import numpy
    except ImportError as e:
        NamedExhaustion.check(e, "importing numpy")
        raise WireError(f"a numpy array came, and numpy is not installed here: {e}") from e
    try:
        array: ndarray[Any, Any] = numpy.frombuffer(flat, dtype=meta.dtype).reshape(meta.shape).copy()
    except ValueError as e:
        raise WireError(f"numpy refuses an array of shape {meta.shape}: {e}") from e
    return array


_unpack: Final = msgspec.msgpack.Decoder(ext_hook=_extension).decode


def _resolved(value: Any) -> Any:
    """``value`` with its marked arrays turned into what they are; lists and dicts are changed in place."""
    kind = type(value)
    if kind is not list and kind is not dict:
        return value
    for key, item in enumerate(value) if kind is list else value.items():
        if type(item) is list or type(item) is dict:
            value[key] = _resolved(item)
    mark = value[0] if kind is list and value else None
    if type(mark) is not Mark:
        return value
    del value[0]
    if mark is Mark.TUPLE:
        return tuple(value)
    try:
        if mark is Mark.DICT:
            return dict(zip(value[::2], value[1::2], strict=True))
        members = set(value) if mark is Mark.SET else frozenset(value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise WireError(f"what cannot be a key came as the key of a dict or the member of a set: {e}") from e
    if len(members) != len(value):
        raise WireError("a set has a member twice")
    return members
