"""Values whose tensors' bytes stay out of band: a small head, and memories that are not copied first.

For a transport that can put a tensor's bytes where the other end reads them. The head is the encoding of
:mod:`kvplug.net.wire.values`, in which a tensor or array that is out of band is an extension of its own with
its meta alone. The head does not say where its bytes are: the memories come in the order of the head, each
at the next multiple of :data:`ALIGNMENT`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvplug.errors import CapacityError, UnsupportedError, WireError
from kvplug.net.exhaustion import raise_if_exhausted
from kvplug.net.wire import tensors, values
from kvplug.net.wire.copying import CopyBytes, copy_bytes
from kvplug.net.wire.validate import DEFAULT_LIMITS, Leaf, Limits, validate

if TYPE_CHECKING:
    from torch import Tensor

Buffer = bytes | bytearray | memoryview

ALIGNMENT: Final = 64
"""Each memory begins at a multiple of it: a cache line's length, and enough for every dtype."""
MIN_BYTES: Final = 4096
"""A smaller tensor costs less inside the head."""


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


def encode_out_of_band(
    value: object, *, min_bytes: int = MIN_BYTES, limits: Limits = DEFAULT_LIMITS
) -> OutOfBand:
    """``value`` as a head and the memories of its tensors and arrays of at least ``min_bytes``.

    No byte of them is copied, unless a tensor or array is not contiguous.

    Raises:
        UnsupportedError: something in it is not carried; the message names the path, the type and what is.
        CapacityError: it is deeper, has more elements or, head and memories together, more bytes than
            ``limits`` allow, so that the peer would refuse it.
        ResourceExhaustedError: there is no memory for the head, or for the copy of one that is not
            contiguous.
    """
    if type(value) in values.AS_THEY_ARE:
        return OutOfBand(values.encode(value, limits=limits), [])
    memories = values.Memories(min_bytes)
    try:
        head = values.pack(values.lower(value, limits.max_depth, [limits.max_items], memories))
    except (UnsupportedError, UnicodeEncodeError) as e:
        values.explain(value, limits.max_depth, e)
    except (MemoryError, RuntimeError) as e:
        raise_if_exhausted(e, "encoding a value")
        raise
    nbytes = len(head) + sum(memory.nbytes for memory in memories.found)
    if nbytes > limits.max_bytes:
        raise CapacityError(f"the value takes {nbytes} bytes, and at most {limits.max_bytes} are sent")
    return OutOfBand(head, memories.found)


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
    nbytes = head.nbytes if isinstance(head, memoryview) else len(head)
    if nbytes > limits.max_bytes:
        raise WireError(f"a value of {nbytes} bytes; at most {limits.max_bytes} are accepted")
    try:
        data = bytes(head)  # a private copy: shared memory could change between the check and the use
        checked = (_checked_short if nbytes <= _SHORT_BYTES else _checked)(data, limits)
        marked, leaves, wanted, lying = checked
        if wanted > limits.max_bytes - nbytes:
            raise WireError(
                f"a value whose tensors have {wanted} bytes; at most {limits.max_bytes - nbytes} are accepted"
            )
        if lying != memories.nbytes:
            raise WireError(
                f"the value's {len(leaves)} memories take {lying} bytes, and {memories.nbytes} came"
            )
        if leaves:
            extension = _from(memories.cast("B"), deque(leaves), make or tensors.empty_like_meta, copy)
            value = msgspec.msgpack.decode(data, ext_hook=extension)
        else:
            value = values.unpack(data)
        return values.resolve(value) if marked else value
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as e:
        raise WireError(f"not the bytes of a value: {e}") from e
    except MemoryError as e:
        raise_if_exhausted(e, f"decoding a value of {nbytes + memories.nbytes} bytes")
        raise


def _checked(data: bytes, limits: Limits) -> tuple[bool, tuple[tensors.TensorMeta, ...], int, int]:
    """Whether a head holds marked arrays, the tensors that are out of band, their bytes, and those that they
    take with the gaps between them.

    Raises:
        WireError: it is no head.
    """
    spans: list[slice] = []
    marked = validate(data, limits, spans)
    leaves = tuple(tensors.decode_meta(data[span]) for span in spans)
    sizes = [meta.nbytes for meta in leaves]
    return marked, leaves, sum(sizes), sum(map(aligned, sizes))


_SHORT_BYTES: Final = 256
_checked_short = functools.lru_cache(maxsize=64)(_checked)
"""Many messages of a stream have the same head."""


def _from(
    memories: memoryview,
    leaves: deque[tensors.TensorMeta],
    make: Callable[[tensors.TensorMeta], Tensor],
    copy: CopyBytes,
) -> Callable[[int, memoryview], Any]:
    """What msgspec calls for each extension, in the order in which they stand."""
    at = 0

    def extension(code: int, payload: memoryview) -> Any:
        nonlocal at
        if code not in _OUT_OF_BAND:
            return values.extension(code, payload)
        meta = leaves.popleft()
        flat = memories[at : at + meta.nbytes]
        at += aligned(meta.nbytes)
        return values.build(code, meta, flat, make, copy)

    return extension


_OUT_OF_BAND = frozenset((Leaf.TENSOR_OUT_OF_BAND, Leaf.ARRAY_OUT_OF_BAND))
