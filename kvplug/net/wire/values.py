"""Encodes plain values, and nothing else, as msgpack with their exact types and within bounds.

Supported: None, bool, int (-2**63 to 2**64 - 1), float, str, bytes, list, tuple, set, frozenset, dict,
torch.dtype, CPU tensors and numpy arrays; not subclasses of these, since they would be decoded as another
type. Types that msgpack lacks are tagged by an extension (the table is in ``docs/reference/wire.md``). A
tuple, for example, is an array whose first element is the mark "tuple", which cannot be a value.

Received bytes are validated first (:mod:`kvplug.net.wire.validate`); only valid ones reach msgspec.

If a transport can put a tensor's bytes where the other end reads them, these bytes can stay *out of band*. A
value is then a small head plus memories that need no prior copy. The head uses the same encoding, except that
a tensor's or array's extension holds only the meta if the bytes are out of band. The head does not contain
the positions of the memories: they lie in the order of the head, each at the next multiple of
:data:`ALIGNMENT`.

torch and numpy are imported only to create a tensor, dtype or array.
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
from kvplug.net.wire.validate import (
    DEFAULT_LIMITS,
    MARKS,
    Leaf,
    Limits,
    Mark,
    validate,
)

if TYPE_CHECKING:
    from torch import Tensor

Buffer = bytes | bytearray | memoryview

ALIGNMENT: Final = 64
"""Each memory out of band begins at a multiple of this: a cache line's length, and enough for every dtype."""
MIN_BYTES: Final = 4096
"""A smaller tensor costs less inside the head."""

_CARRIED: Final = (
    "None, bool, int of 64 bits, float, str, bytes, list, tuple, set, frozenset, dict, torch.dtype,"
    " CPU tensor, numpy array"
)
_AS_THEY_ARE: Final = frozenset({type(None), bool, int, float, str, bytes})
"""The only types that msgspec is given unchanged, including as keys of a dict."""
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
"""dtype names that numpy and torch share."""


class OutOfBand(NamedTuple):
    """A value in two parts. The memories belong to its tensors, so do not overwrite them before they are
    sent."""

    head: bytes
    """The value without its tensors' bytes."""
    memories: list[memoryview]
    """Flat bytes, in the order that :func:`decode_out_of_band` expects."""

    @property
    def nbytes(self) -> int:
        """The total size of the memories, each of them :func:`aligned`."""
        return sum(aligned(memory.nbytes) for memory in self.memories)


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of :data:`ALIGNMENT`: the space that a memory takes among others."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# -- encoding --------------------------------------------------------------------------------------


def encode(value: object, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return the encoding of ``value``.

    Raises:
        UnsupportedError: part of it is not supported; the message names the path, its type and the supported
            types.
        CapacityError: it is deeper, or has more elements or bytes, than ``limits`` allow, so that the peer
            would refuse it.
        ResourceExhaustedError: there is not enough memory.
    """
    return _encode(value, limits, _WITHIN)


def encode_out_of_band(
    value: object, *, min_bytes: int = MIN_BYTES, limits: Limits = DEFAULT_LIMITS
) -> OutOfBand:
    """Encode ``value`` as a head and the memories of its tensors and arrays of at least ``min_bytes``.

    Their bytes are not copied unless a tensor or array is not contiguous. Raises as :func:`encode`; the limit
    on bytes applies to head and memories together.
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
        raise CapacityError(f"the value takes {nbytes} bytes, but at most {limits.max_bytes} can be sent")
    return data


def _lowered(value: Any, depth: int, room: list[int], leaves: _Leaves) -> Any:
    """Convert ``value`` to msgspec's own types and marks. ``room``: elements still allowed."""
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
    room[0] -= len(value) * (2 if kind is dict else 1) + (mark is not None)  # a mark counts as an element
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
    """Encodes dtypes, tensors and arrays; keeps memories of at least ``min_bytes`` out of band."""

    __slots__ = ("memories", "_min_bytes")

    def __init__(self, min_bytes: int) -> None:
        self.memories: list[memoryview] = []
        self._min_bytes = min_bytes

    def extension_of(self, value: Any) -> msgspec.msgpack.Ext:
        """Return the extension for ``value``. Raises UnsupportedError: its type is not supported."""
        torch = sys.modules.get("torch")
        # While another thread imports torch, the module lacks its names, so nothing is a tensor yet.
        if torch is not None and hasattr(torch, "Tensor") and hasattr(torch, "dtype"):
            if isinstance(value, torch.dtype):
                name = tensors.dtype_name(value)
                if name in tensors.DTYPES:
                    return msgspec.msgpack.Ext(int(Leaf.DTYPE), bytes([tensors.DTYPES[name][0]]))
                raise UnsupportedError(f"the dtype {value} is not supported")
            if type(value) is torch.Tensor:
                return self._extension(Leaf.TENSOR, tensors.meta_of(value), tensors.memory_of(value))
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "ndarray") and type(value) is numpy.ndarray:
            if value.dtype.name not in _ARRAY_DTYPES or not value.dtype.isnative:
                raise UnsupportedError(
                    f"a numpy array of dtype {value.dtype} is not supported; supported are, in the machine's"
                    f" byte order: {', '.join(sorted(_ARRAY_DTYPES))}"
                )
            flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
            meta = tensors.TensorMeta(value.dtype.name, value.shape)
            return self._extension(Leaf.ARRAY, meta, memoryview(flat).toreadonly())
        kind = type(value)
        where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise UnsupportedError(f"a {where}{kind.__qualname__} is not supported")

    def _extension(self, leaf: Leaf, meta: tensors.TensorMeta, memory: memoryview) -> msgspec.msgpack.Ext:
        data = tensors.encode_meta(meta)
        if memory.nbytes < self._min_bytes:
            data = b"".join((data, memory))
        else:
            self.memories.append(memory)
        return msgspec.msgpack.Ext(int(leaf), data)


_WITHIN: Final = _Leaves(sys.maxsize)
"""Encodes all leaves in band, so it keeps no memories."""
_encoder: Final = msgspec.msgpack.Encoder()
_LARGE_BYTES: Final = 64 << 10
_MOST_LOOKED_AT: Final = 16


def _pack(value: Any) -> bytes:
    """Return msgspec's encoding of a value from :func:`_lowered`.

    ``Encoder.encode`` grows its memory as it writes, and crashes the process if there is no more (msgspec
    0.22). So a value that looks large is written into memory that was allocated first.

    Raises:
        MemoryError: there is not enough memory.
    """
    nbytes = _large_nbytes(value)
    if not nbytes:
        return _encoder.encode(value)
    memory = bytearray(nbytes + _LARGE_BYTES)
    _encoder.encode_into(value, memory)
    return bytes(memory)


def _large_nbytes(value: Any) -> int:
    """Sum the sizes of the large byte strings and texts in a value, and in its elements if there are few."""
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
    """Return ``error`` with the path to the value that caused it. Slow, and only called on failure."""
    for path, item in _walk(value, "value", depth):
        try:
            _pack(_lowered(item, 0, [0], _Leaves(0)))
        except UnsupportedError as e:
            return UnsupportedError(f"{path}: {e}; supported are: {_CARRIED}")
        except UnicodeEncodeError as e:
            return UnsupportedError(f"{path}: a str with a lone surrogate cannot be encoded as UTF-8: {e}")
        except OverflowError:
            return UnsupportedError(f"{path}: an integer of {item.bit_length()} bits does not fit into 64")
    return UnsupportedError(f"value: {error}")  # another thread has changed the value


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield everything in ``value`` that is not a container, with its path."""
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
    """Decode ``buf``. If a key occurs twice in a dict, the last one counts.

    Raises:
        WireError: the bytes are not an encoding, exceed ``limits``, or hold a tensor, dtype or array while
            torch or numpy is not installed.
        ResourceExhaustedError: there is not enough memory. Nothing else is raised, whatever the bytes.

    At most ``limits.memory_bound(len(buf))`` bytes are allocated (besides importing torch).
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
    """Decode a head and its memories, which lie back to back, each of them :func:`aligned`.

    Everything out of band is copied. A tensor is copied into the tensor of its dtype and shape that ``make``
    returns for its meta. Without ``make``, and always for numpy arrays and everything in the head, new memory
    is allocated. ``copy(target, source)`` copies a tensor's bytes.

    Raises:
        WireError: the bytes are not a head, exceed ``limits``, need other memories than these, or hold a
            tensor, dtype or array while torch or numpy is not installed.
        ResourceExhaustedError: there is not enough memory.
        Errors of ``make``. Nothing else is raised, whatever the bytes.

    At most ``limits.memory_bound`` of head and memories together is allocated (besides importing torch, and
    by ``make``).
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
        raise WireError(f"a value has {nbytes} bytes, but at most {limits.max_bytes} are accepted")
    try:
        data = bytes(buf)  # a private copy: shared memory could change between the check and the use
        if memories is None:
            is_marked = validate(data, limits)
            value = _unpack(data)
        else:
            checked = _checked_short if nbytes <= _SHORT_BYTES else _checked
            is_marked, metas, wanted, lying = checked(data, limits)
            most = limits.max_bytes - nbytes
            if wanted > most:
                raise WireError(f"a value's tensors have {wanted} bytes, but at most {most} are accepted")
            if lying != memories.nbytes:
                raise WireError(
                    f"the value's {len(metas)} memories take {lying} bytes, but {memories.nbytes} came"
                )
            leaves = _Received(metas, memories.cast("B"), make, copy) if metas else _WHOLE
            value = msgspec.msgpack.decode(data, ext_hook=leaves)
        return _resolved(value) if is_marked else value
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as e:
        raise WireError(f"the bytes do not encode a value: {e}") from e
    except (MemoryError, UnsupportedError, RuntimeError) as e:
        NamedExhaustion.check(e, f"decoding a value of {nbytes + (memories.nbytes if memories else 0)} bytes")
        if isinstance(e, MemoryError):
            raise
        raise WireError(f"a tensor or dtype cannot be created here: {e}") from e


def _checked(data: bytes, limits: Limits) -> tuple[bool, tuple[tensors.TensorMeta, ...], int, int]:
    """Validate a head. Returns whether it contains marks, the metas of the leaves out of band, and their
    total bytes without and with the gaps between them.

    Raises:
        WireError: it is not a head.
    """
    metas: list[tensors.TensorMeta] = []
    is_marked = validate(data, limits, metas)
    sizes = [meta.nbytes for meta in metas]
    return is_marked, tuple(metas), sum(sizes), sum(map(aligned, sizes))


_SHORT_BYTES: Final = 256
_checked_short = functools.lru_cache(maxsize=64)(_checked)
"""Many messages of a stream have the same head."""


class _Received:
    """Decodes the extensions of a value that passed :func:`validate`, as msgspec's hook.

    msgspec calls it for the leaves out of band in the order of their memories.
    """

    def __init__(
        self,
        metas: tuple[tensors.TensorMeta, ...],
        memories: memoryview,
        make: Callable[[tensors.TensorMeta], Tensor],
        copy: CopyBytes,
    ) -> None:
        self._metas = iter(metas) if metas else None
        self._memories = memories
        self._make = make
        self._copy = copy

    def __call__(self, code: int, payload: memoryview) -> Any:
        if not payload.nbytes:
            return MARKS[code]
        # msgspec 0.19 gives the view the shape of the whole message, so that slices of it reach past the end
        # of memory (its issue 835). A cast recomputes the shape from the number of bytes, which is right.
        payload = payload.cast("B")
        if code == Leaf.DTYPE:
            return tensors.dtype_of(tensors.name_of_code(payload[0]))
        if self._metas is not None and payload.nbytes == tensors.META_PREFIX_SIZE + 8 * payload[1]:
            meta, make = next(self._metas), self._make
            nbytes = meta.nbytes
            flat, self._memories = self._memories[:nbytes], self._memories[aligned(nbytes) :]
        else:
            meta, flat = tensors.split_meta(payload)
            make = tensors.empty_like_meta
            if meta.nbytes != flat.nbytes:
                raise WireError(
                    f"a {meta.dtype} tensor of shape {meta.shape} has {meta.nbytes} bytes, not {flat.nbytes}"
                )
        if code == Leaf.TENSOR:
            tensor = make(meta)
            tensors.copy_into(tensor, flat, self._copy)
            return tensor
        if meta.dtype not in _ARRAY_DTYPES:
            raise WireError(f"numpy has no dtype {meta.dtype}")
        try:
            import numpy
        except ImportError as e:
            NamedExhaustion.check(e, "importing numpy")
            raise WireError(f"a numpy array came, but numpy is not installed here: {e}") from e
        try:
            return numpy.frombuffer(flat, dtype=meta.dtype).reshape(meta.shape).copy()
        except ValueError as e:
            raise WireError(f"numpy refuses an array of shape {meta.shape}: {e}") from e


_WHOLE: Final = _Received((), memoryview(b""), tensors.empty_like_meta, copy_bytes)
"""For values without memories out of band."""
_unpack: Final = msgspec.msgpack.Decoder(ext_hook=_WHOLE).decode


def _resolved(value: Any) -> Any:
    """Convert the marked arrays in ``value`` into their types. Lists and dicts are changed in place."""
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
        raise WireError(f"a dict has a key, or a set a member, that cannot be hashed: {e}") from e
    if len(members) != len(value):
        raise WireError("a set has a member twice")
    return members
