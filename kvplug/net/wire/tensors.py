"""Tensors' metadata, and access to their bytes without a copy.

The meta is ``code: u8, ndim: u8, ndim x u64`` (little-endian), see :data:`DTYPES`; the tensor's bytes
follow it in row-major order, in the machine's (little-endian) byte order. The meta's functions work without
torch. Only functions that get a tensor or must create one import torch.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.errors import TensorMismatchError, UnsupportedError, WireError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.wire.copying import CopyBytes, copy_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Buffer = bytes | bytearray | memoryview

MAX_DIMS: Final = 64
"""The limit of torch's own kernels."""
MAX_NBYTES: Final = (1 << 63) - 1

DTYPES: Final[dict[str, tuple[int, int]]] = {
    # name: (code on the wire, bytes per element). A code's meaning never changes.
    "bool": (1, 1),
    "uint8": (2, 1),
    "int8": (3, 1),
    "int16": (4, 2),
    "int32": (5, 4),
    "int64": (6, 8),
    "uint16": (7, 2),
    "uint32": (8, 4),
    "uint64": (9, 8),
    "float16": (10, 2),
    "bfloat16": (11, 2),
    "float32": (12, 4),
    "float64": (13, 8),
    "complex32": (14, 4),
    "complex64": (15, 8),
    "complex128": (16, 16),
    "float8_e4m3fn": (17, 1),
    "float8_e4m3fnuz": (18, 1),
    "float8_e5m2": (19, 1),
    "float8_e5m2fnuz": (20, 1),
    "float8_e8m0fnu": (21, 1),
    "float4_e2m1fn_x2": (22, 1),
    **{f"uint{bits}": (31 + bits, 1) for bits in range(1, 8)},
    **{f"int{bits}": (39 + bits, 1) for bits in range(1, 8)},
    "bits8": (48, 1),
    "bits16": (49, 2),
    "bits1x8": (50, 1),
    "bits2x4": (51, 1),
    "bits4x2": (52, 1),
}
"""torch's names. Quantised dtypes are left out on purpose: their bytes mean nothing without a scale."""

_WITH_KERNELS = {"bool", "uint8", "int8", "int16", "int32", "int64"}
_WITH_KERNELS |= {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}

# One type for every size: a separate array type per size would cost 3 KB, freed only by the garbage
# collector, which an engine may have turned off. Nothing is allocated, and callers only see a slice.
_Memory = ctypes.c_ubyte * (sys.maxsize // 2)

_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_PREFIX = struct.Struct("<BB")
META_PREFIX_SIZE: Final = _PREFIX.size
"""How many bytes of a meta :func:`meta_size` needs."""


def _itemsize_of(dtype: str) -> int:
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[dtype][1]


@attrs.frozen
class TensorMeta:
    """How to interpret a run of bytes: dtype and shape.

    Raises:
        UnsupportedError: kvplug cannot carry this dtype, or this number or size of dimensions.
    """

    dtype: str
    """torch's name without ``torch.``."""
    shape: tuple[int, ...] = attrs.field(converter=tuple[int, ...])
    """Sizes of its axes; empty for a tensor without axes."""

    def __attrs_post_init__(self) -> None:
        shape, extent = self.shape, _itemsize_of(self.dtype)
        if len(shape) > MAX_DIMS:
            raise UnsupportedError(
                f"a tensor of {len(shape)} dimensions is not supported; at most {MAX_DIMS} are"
            )
        for size in shape:
            if type(size) is not int or size < 0:
                raise UnsupportedError(f"a shape must consist of integers of at least 0, not {shape!r}")
            extent *= size or 1  # even an empty tensor's other sizes must not overflow strides
            if extent > MAX_NBYTES:
                raise UnsupportedError(f"a tensor of shape {shape!r} has more than {MAX_NBYTES} bytes")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.itemsize * math.prod(self.shape)

    def mismatch(self, came: TensorMeta | None, given: str) -> TensorMismatchError:
        """Return the error that the next message does not fit into memory of this dtype and shape.

        The message stays unreceived. ``given`` names the memory: "out= is", "the blocks are". ``came`` is the
        message's meta.
        """
        what = "None" if came is None else f"{came.dtype} of shape {list(came.shape)}"
        return TensorMismatchError(
            f"the next message is {what}, and {given} {self.dtype} of shape {list(self.shape)}; it stays"
        )


# -- the meta as bytes ---------------------------------------------------------------------------


@functools.lru_cache(1024)  # a peer sees the same few shapes again and again, here and below
def encode_meta(meta: TensorMeta) -> bytes:
    """Return the meta as ``2 + 8 * ndim`` bytes."""
    ndim = len(meta.shape)
    return struct.pack(f"<BB{ndim}Q", DTYPES[meta.dtype][0], ndim, *meta.shape)


def meta_size(prefix: Buffer) -> int:
    """Return the length of the meta that starts with these bytes (``META_PREFIX_SIZE`` of them suffice).

    Raises:
        WireError: an unknown dtype code or too many dimensions.
    """
    try:
        code, ndim = _PREFIX.unpack_from(prefix)
    except (struct.error, TypeError, BufferError) as e:
        raise WireError(f"a tensor's meta is cut short: {e}") from e
    name_of_code(code)
    if ndim > MAX_DIMS:
        raise WireError(f"a tensor's meta claims {ndim} dimensions; at most {MAX_DIMS} are accepted")
    return META_PREFIX_SIZE + 8 * int(ndim)


def name_of_code(code: int) -> str:
    """Return the name of the dtype with this code on the wire.

    Raises:
        WireError: the code is unknown.
    """
    name = _NAMES.get(code)
    if name is None:
        raise WireError(f"unknown dtype code {code}")
    return name


def split_meta(buf: Buffer) -> tuple[TensorMeta, memoryview]:
    """Return the meta at the start of ``buf``, and the bytes after it.

    Raises:
        WireError: these are not the bytes of a meta.
    """
    view = memoryview(buf)
    size = META_PREFIX_SIZE + 8 * (view[1] if view.nbytes > 1 else 0)
    return _decoded(bytes(view[:size])), view[size:]


def decode_meta(buf: Buffer) -> TensorMeta:
    """Decode a meta that fills ``buf`` exactly. Check its ``nbytes`` before allocating memory for the tensor.

    Raises:
        WireError: these are not the bytes of a meta.
    """
    return _decoded(bytes(buf))


@functools.lru_cache(1024)
def _decoded(data: bytes) -> TensorMeta:
    size = meta_size(data)
    if len(data) < size:
        raise WireError(f"a tensor's meta of {size} bytes is cut short after {len(data)}")
    if len(data) > size:
        raise WireError(f"{len(data) - size} bytes follow a tensor's meta")
    try:
        return TensorMeta(_NAMES[data[0]], struct.unpack_from(f"<{data[1]}Q", data, META_PREFIX_SIZE))
    except UnsupportedError as e:
        raise WireError(f"a tensor's meta is out of bounds: {e}") from e


@functools.lru_cache(1024)
def _meta_of(dtype: torch.dtype, shape: torch.Size) -> TensorMeta:
    return TensorMeta(dtype_name(dtype), tuple(shape))


# -- tensors -------------------------------------------------------------------------------------


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).rpartition(".")[2]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        UnsupportedError: the installed torch lacks the dtype, or torch is not installed.
    """
    try:
        import torch
    except ImportError as e:
        NamedExhaustion.check(e, "importing torch")
        raise UnsupportedError(
            f"a {name} tensor or dtype needs torch, which is not installed here: {e}"
        ) from e
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {name!r}")
    return found


def meta_of(tensor: Tensor) -> TensorMeta:
    """Return the dtype and shape of a tensor on any device.

    Raises:
        UnsupportedError: the tensor is quantised, sparse, nested, or has more than 64 dimensions.
    """
    _check_strided(tensor)
    return _meta_of(tensor.dtype, tensor.shape)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor in row-major order, as a flat read-only view that keeps them alive.

    They are not copied unless the tensor is non-contiguous or lazily conjugated or negated: then the view
    shows a contiguous copy made now.

    Raises:
        UnsupportedError: the tensor is not dense and in CPU memory, or its dtype is not supported.
    """
    _check_memory(tensor)
    return _view(dense(tensor)).toreadonly()


def memory_of_writable(tensor: Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor's memory. The view keeps the tensor alive.

    Raises:
        UnsupportedError: as :func:`memory_of`, or the tensor is not contiguous (use :func:`copy_into` then).
    """
    _check_memory(tensor)
    if not is_dense(tensor):
        raise UnsupportedError("only a contiguous tensor can be filled in place; this one is not")
    return _view(tensor)


def empty_like_meta(meta: TensorMeta, device: str = "cpu") -> Tensor:
    """Return a contiguous, uninitialised tensor on ``device``. The caller has checked its size.

    Raises:
        UnsupportedError: the installed torch lacks the dtype, or torch is not installed.
        ResourceExhaustedError: there is not enough memory.
    """
    dtype = dtype_of(meta.dtype)
    import torch

    try:
        if meta.dtype in _WITH_KERNELS:
            return torch.empty(meta.shape, dtype=dtype, device=device)
        # Made from bytes: torch may have to fill new tensors, and has no kernels to fill the other dtypes.
        flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as e:
        NamedExhaustion.check(e, f"a tensor of {meta.nbytes} bytes on {device}")
        raise
    return flat.view(dtype).view(meta.shape)


def copy_into(out: Tensor, flat: Buffer, copy: CopyBytes = copy_bytes) -> None:
    """Fill ``out``, contiguous or not, with the row-major bytes of a tensor of its shape and dtype.

    ``copy(target, source)`` copies them.

    Raises:
        UnsupportedError: ``out`` is not a dense tensor in CPU memory.
        ValueError: ``flat`` and ``out`` differ in size.
    """
    source = memoryview(flat).cast("B")
    _check_memory(out)
    if source.nbytes != out.numel() * out.element_size():
        raise ValueError(
            f"{source.nbytes} bytes do not match a tensor of shape {tuple(out.shape)} and dtype {out.dtype}"
        )
    if is_dense(out):
        copy(_view(out), source)
        return
    whole = empty_like_meta(meta_of(out))
    copy(_view(whole), source)
    copy_tensor(out, whole)


def copy_tensor(out: Tensor, whole: Tensor) -> None:
    """Copy a dense tensor into ``out``, which has the same shape, dtype and device, and any strides."""
    out = out.detach()
    if out.is_conj() or out.is_neg():
        out.copy_(whole)  # copy_ accounts for out's flag, so that out then reads as whole
    else:
        as_bits(out).copy_(as_bits(whole))


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor on any device as it is if :func:`is_dense`, else as a contiguous copy, viewed as
    integers."""
    if is_dense(tensor):
        return tensor
    return as_bits(tensor.detach().resolve_conj().resolve_neg()).contiguous()


def as_bits(tensor: Tensor) -> Tensor:
    """View the same memory as integers, so that copying works for dtypes without kernels and keeps every
    NaN."""
    import torch

    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    as_dtype = by_size.get(tensor.element_size())
    return tensor if as_dtype is None else tensor.view(as_dtype)


def _check_strided(tensor: Tensor) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"a torch.Tensor is needed, not a {type(tensor).__qualname__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise UnsupportedError(f"only dense tensors are supported, not {tensor.layout} or nested ones")


def _check_memory(tensor: Tensor) -> None:
    _check_strided(tensor)
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"only CPU memory can be read here, but the tensor is on {tensor.device}")
    _itemsize_of(dtype_name(tensor.dtype))


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its bytes in the order in which they are sent."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _view(tensor: Tensor) -> memoryview:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    # By address, since torch does not offer the buffer protocol and numpy lacks half of the dtypes.
    array = _Memory.from_address(tensor.data_ptr())
    # The view keeps the array alive, and the array keeps the memory alive, even if assigning .data gives the
    # tensor other memory.
    array._owner = tensor, tensor.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(array).cast("B")[:nbytes]
