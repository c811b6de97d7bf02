"""Layouts of a paged KV cache in memory, and copies of ranges of tokens out of it and into it.

A layout is a string of axis letters, outermost in memory first, and a size for each axis:

    K  the pair (key, value)      always 2
    B  blocks
    T  tokens in a block
    H  key/value heads
    D  head size

Every cache has B, T and D. A cache of keys and values per head also has K and H. A cache of latent attention
(MLA) has neither: it has one vector per token, and no values. The letters may come in any order. NHD is
``KBTHD``, HND is ``KBHTD``.

**Packed or separate.** If K comes directly before D, keys and values are *packed*: the two letters are one
dimension of the tensor, of size 2 * head_size, with the keys first. ``BHTKD`` is a tensor of four dimensions,
[blocks, heads, tokens, 2 * head_size]. Anywhere else K is a separate dimension.

A layout is derived from the engine's own statements and from strides, never from a shape: with 16 heads and
16 tokens in a block, NHD and HND have the same shape.

**The inside of a block.** Some attention kernels store keys in their own order, transposed or in tiles, which
the shape does not show. An engine that does not know the order inside its blocks names their
``block_format``. Such blocks are only moved whole, between caches of the same format.

**Copies.** A copy takes at most three operations for keys and three for values: the part of the first block,
all whole blocks at once, and the part of the last block. For every layout, ``as_strided`` gives a view of the
cache as [block, token, head, element] at no cost.

**Pages.** If the axes fully describe a cache, its pages have the same format for every layout: keys, then
values, each [tokens, heads, head size]; for latent attention, one latent vector per token. So engines with
different layouts and block sizes share pages. A page of blocks in a kernel's own order can only be read by an
engine with the same kernel.

The arithmetic does not need torch; ``Tensor`` is ``torch.Tensor``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug.errors import LayoutError
from kvplug.transport.block_views import BlockViews, block_table, check_distinct
from kvplug.transport.store.cache_blocks import copy_tokens, ids_on
from kvplug.transport.store.format import PageFormat, Part

if TYPE_CHECKING:
    from torch import Tensor

LETTERS = "KBTHD"
"""All axes."""


PAGE_TOKENS = 16
"""Tokens in a page by default."""


@functools.lru_cache(maxsize=256)
def dimensions(axes: str) -> tuple[str, ...]:
    """Return the dimensions of a tensor with these axes: one letter each, or ``"KD"`` if packed.

    Raises:
        LayoutError: ``axes`` is not an axis string.
    """
    unknown = sorted(set(axes) - set(LETTERS))
    if unknown or not axes:
        raise LayoutError(f"{axes!r} is not an axis string: expected letters of {LETTERS}, got {unknown}")
    if len(set(axes)) != len(axes):
        raise LayoutError(f"{axes!r} is not an axis string: it repeats a letter")
    before, packed, after = axes.partition("KD")
    return (*before, *((packed,) if packed else ()), *after)


def _ordered(sizes: Mapping[str, int] | tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Return the sizes as a hashable value that does not depend on their order."""
    return tuple(sorted(dict(sizes).items(), key=lambda pair: LETTERS.find(pair[0])))


@attrs.frozen
class KVLayout:
    """How one tensor of a paged KV cache lies in memory.

    ``KVLayout("BHTKD", {"T": 16, "H": 3, "D": 64})``. Leave out the number of blocks (``B``) if tensors may
    differ in it. ``K`` is always 2 and may be left out.

    >>> layout = KVLayout("BHTKD", {"B": 1000, "T": 16, "H": 3, "D": 64})
    >>> layout.shape
    (1000, 3, 16, 128)
    >>> layout.block_size, layout.is_packed
    (16, True)

    Raises:
        LayoutError: the axes are not those of a KV cache; a size is missing, not positive, or names no axis.
    """

    axes: str
    """One letter for each axis of the tensor, outermost first: B blocks, T tokens in a block, K keys and
    values (2), H heads, D head size."""
    _sizes: tuple[tuple[str, int], ...] = attrs.field(converter=_ordered)
    """Size of each axis by its letter: a mapping, or pairs."""
    block_format: str = attrs.field(default="", kw_only=True)
    """Name of an attention kernel's own order inside a block. The axes then give only the block's size.

    Such blocks are moved whole, into a cache of the same layout and block format. Empty if the axes describe
    the order.
    """

    def __attrs_post_init__(self) -> None:
        dimensions(self.axes)
        missing = [letter for letter in "BTD" if letter not in self.axes]
        if missing:
            raise LayoutError(f"a KV cache has the axes B, T and D; {self.axes!r} lacks {', '.join(missing)}")
        if ("K" in self.axes) != ("H" in self.axes):
            raise LayoutError(
                f"a KV cache has both K and H (keys and values per head) or neither (latent attention);"
                f" {self.axes!r} has only one of them"
            )
        sizes = dict(self._sizes)
        if "K" in self.axes:
            sizes.setdefault("K", 2)
        for letter, size in sizes.items():
            if letter not in set(self.axes):
                raise LayoutError(f"a size is given for {letter!r}, which is not an axis of {self.axes!r}")
            if not _is_size(size):
                raise LayoutError(f"the size of axis {letter} must be a positive integer, got {size!r}")
        if sizes.get("K", 2) != 2:
            raise LayoutError(f"axis K is a key and a value: its size is 2, not {sizes['K']}")
        lacking = [letter for letter in self.axes if letter not in sizes and letter != "B"]
        if lacking:
            raise LayoutError(f"layout {self.axes!r} needs the sizes of {', '.join(lacking)} too")
        object.__setattr__(self, "_sizes", _ordered(sizes))

    # -- properties ----------------------------------------------------------------------------

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its letter; ``B`` only if known."""
        return dict(self._sizes)

    @property
    def num_blocks(self) -> int | None:
        """The number of blocks, or ``None`` if the layout leaves it open."""
        return self.sizes.get("B")

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.sizes["T"]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads; 1 for latent attention."""
        return self.sizes.get("H", 1)

    @property
    def head_size(self) -> int:
        """Elements in one head of one token."""
        return self.sizes["D"]

    @property
    def has_values(self) -> bool:
        """Whether there are values besides the keys. False for latent attention."""
        return "K" in self.axes

    @property
    def is_packed(self) -> bool:
        """Whether keys and values share one dimension of the tensor."""
        return "KD" in self.axes

    @property
    def granule(self) -> int:
        """The smallest number of tokens that can be moved: 1, or a whole block in a kernel's own order."""
        return self.block_size if self.block_format else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor.

        Raises:
            LayoutError: the layout leaves the number of blocks open.
        """
        if self.num_blocks is None:
            raise LayoutError(f"layout {self.axes!r} leaves the number of blocks open: it has no shape")
        return tuple(_size_of(dimension, self.sizes) for dimension in dimensions(self.axes))

    # -- checking ------------------------------------------------------------------------------

    def check_range(self, start: int, end: int) -> None:
        """Check that tokens ``start`` to ``end`` (exclusive) of a sequence can be moved without other tokens.

        Raises:
            LayoutError: the range begins or ends inside a block that only its kernel can read.
        """
        if start % self.granule or end % self.granule:
            raise LayoutError(
                f"tokens {start} to {end} are not whole blocks of {self.block_size}, and the inside of a"
                f" block is in the kernel's own order ({self.block_format})"
            )

    def check(self, tensor: Tensor) -> None:
        """Check that the tensor has this layout in memory.

        Compares shape and strides: the dimensions must be in the order of memory, outermost first, and
        elements must not share memory. Gaps (a view of a larger tensor) are allowed.

        Raises:
            LayoutError: the message names the axis, and what was expected and found.
        """
        self.check_shape(tuple(tensor.shape))
        named = [
            (name, size, stride)
            for name, size, stride in zip(dimensions(self.axes), tensor.shape, tensor.stride(), strict=True)
            if size > 1  # the stride of a dimension of one element is arbitrary
        ]
        room = 0  # distance from the first to the last element of the inner dimensions
        for name, size, stride in reversed(named):
            if stride <= room:
                in_memory = "".join(name for name, *_ in sorted(named, key=lambda dim: -dim[2]))
                raise LayoutError(
                    f"axis {name}: layout {self.axes!r} expects a stride of more than {room} elements, got"
                    f" {stride} (memory order {in_memory}); permute the tensor, and order the layout's axes,"
                    " by decreasing stride; elements must not share memory"
                )
            room += (size - 1) * stride

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Check that a tensor of this shape can have this layout. :meth:`check` compares strides too.

        Raises:
            LayoutError: the message names the axis, and what was expected and found.
        """
        names, sizes = dimensions(self.axes), dict(self._sizes)
        if len(shape) != len(names):
            raise LayoutError(
                f"layout {self.axes!r} expects {len(names)} dimensions ({', '.join(names)}), got"
                f" {len(shape)}: {list(shape)}"
            )
        for name, found in zip(names, shape, strict=True):
            if name == "B" and "B" not in sizes:
                continue
            expected = _size_of(name, sizes)
            if found != expected:
                raise LayoutError(
                    f"axis {name}: layout {self.axes!r} expects {expected}, got {found} (shape {list(shape)})"
                )

    # -- copying -------------------------------------------------------------------------------

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return keys and values as views of the cache, each [blocks, tokens, heads, head size].

        For latent attention there is one head, and the values are ``None``.

        Raises:
            LayoutError: the cache does not have the layout's shape.
        """
        self.check_shape(tuple(cache.shape))
        sizes = self.sizes
        strides: dict[str, int] = {}
        for name, stride in zip(dimensions(self.axes), cache.stride(), strict=True):
            if name == "KD":
                strides["K"], strides["D"] = stride * sizes["D"], stride
            else:
                strides[name] = stride
        offset = cache.storage_offset()
        num_blocks = cache.shape[dimensions(self.axes).index("B")]
        shape = (num_blocks, sizes["T"], sizes.get("H", 1), sizes["D"])
        stride4 = (strides["B"], strides["T"], strides.get("H", strides["D"]), strides["D"])
        key = cache.as_strided(shape, stride4, offset)
        value = cache.as_strided(shape, stride4, offset + strides["K"]) if "K" in strides else None
        return key, value

    def gather(
        self,
        cache: Tensor,
        block_ids: Sequence[int],
        start: int,
        end: int,
        *,
        out_key: Tensor | None = None,
        out_value: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Copy the KV of tokens ``start`` to ``end`` (exclusive) of one sequence out of the cache.

        Args:
            block_ids: the sequence's block table; block ``i`` of it begins with token i * block_size.
            out_key, out_value: memory to copy into, shape [end - start, heads, head size], of the cache's
                dtype and device; need not be contiguous. Allocated by default.

        Returns:
            ``(key, value)``, each [tokens, heads, head size]; for latent attention one head, and ``None``.

        Raises:
            LayoutError: the cache does not have this layout; a block id is out of range or repeated; there
                are too few blocks; ``out_key`` or ``out_value`` does not fit; the range includes part of a
                block that can only be moved whole (``block_format``). Nothing was copied.
        """
        views = self.views(cache)
        given = [out_key, out_value]
        for at, view in enumerate(views):
            if given[at] is None and view is not None:
                given[at] = view.new_empty((max(0, end - start), *view.shape[2:]))
        self._copy(views, block_ids, start, end, given, into_cache=False)
        key, value = given
        assert key is not None
        return key, value

    def scatter(
        self,
        cache: Tensor,
        block_ids: Sequence[int],
        start: int,
        key: Tensor,
        value: Tensor | None = None,
    ) -> None:
        """Copy the KV of a sequence's tokens, from token ``start`` on, into the cache.

        Args:
            key, value: [tokens, heads, head size], of the cache's dtype and device; need not be contiguous.
                ``value`` is ``None`` for latent attention only.

        Raises:
            LayoutError: as for :meth:`gather`. Nothing was copied.
        """
        end = start + (key.shape[0] if key.dim() else 0)
        self._copy(self.views(cache), block_ids, start, end, (key, value), into_cache=True)

    def _copy(
        self,
        views: Sequence[Tensor | None],
        block_ids: Sequence[int],
        start: int,
        end: int,
        tokens: Sequence[Tensor | None],
        *,
        into_cache: bool,
    ) -> None:
        """Check everything, then copy keys and values between their views of the cache and ``tokens``."""
        if not 0 <= start <= end:
            raise LayoutError(f"tokens {start} to {end} are not a range")
        self.check_range(start, end)
        size, pairs = self.block_size, []
        if end > len(block_ids) * size:
            raise LayoutError(
                f"tokens {start} to {end} do not fit {len(block_ids)} blocks of {size}, which hold"
                f" {len(block_ids) * size}"
            )
        for name, view, given in zip(("key", "value"), views, tokens, strict=True):
            if view is not None and given is not None:
                pairs.append((view, given))
                wanted = (end - start, *view.shape[2:])
                if tuple(given.shape) != wanted:
                    raise LayoutError(f"{name}: expected the shape {list(wanted)}, got {list(given.shape)}")
                if given.dtype != view.dtype or given.device != view.device:
                    raise LayoutError(
                        f"{name}: expected {view.dtype} on {view.device}, as the cache has, got {given.dtype}"
                        f" on {given.device}"
                    )
            elif view is not None or given is not None:
                has = "no values, but some" if view is None else "values, but none"
                raise LayoutError(f"layout {self.axes!r} has {has} were given")
        table = block_table(block_ids[start // size : -(-end // size)], pairs[0][0].shape[0])
        check_distinct(table)
        if start < end:
            for view, given in pairs:
                ids = ids_on(table, view.device)
                copy_tokens(view, table, ids, start, given, into_cache=into_cache)

    # -- pages ---------------------------------------------------------------------------------

    def page_tokens(self, wanted: int | None = None) -> int:
        """Return the number of tokens in a page of a cache with this layout.

        Args:
            wanted: the number that the operator sets. The default is 16, rounded up to whole blocks if blocks
                cannot be divided.

        Raises:
            LayoutError: ``wanted`` tokens cannot be moved without the rest of a block.
        """
        granule = self.granule
        if wanted is None:
            return math.ceil(PAGE_TOKENS / granule) * granule
        if wanted < 1 or wanted % granule:
            raise LayoutError(
                f"pages of {wanted} tokens: the inside of a block of {granule} is in the kernel's own order"
                f" ({self.block_format}), so a page must be a multiple of {granule} tokens"
            )
        return wanted

    def page_format(self, dtype: str, num_layers: int, page_tokens: int) -> PageFormat:
        """Return the format of pages of ``page_tokens`` tokens of a cache whose layers have this layout.

        ``dtype``: torch's name, without ``torch.``.
        """
        own_order = bool(self.block_format)
        shape = (page_tokens, self.num_kv_heads, self.head_size)
        names = ("key", "value") if self.has_values else ("latent",)
        return PageFormat(
            page_tokens=page_tokens,
            num_layers=num_layers,
            parts=tuple(
                Part(
                    name=name,
                    dtype=dtype,
                    shape=shape,
                    token_axis=None if own_order else 0,
                    head_axis=1 if self.has_values and not own_order else None,
                )
                for name in names
            ),
            # A kernel's own order also depends on the layout and the block size.
            block_format=f"{self.block_format}, {self.axes}, {self.block_size}" if own_order else "",
        )

    def page_views(self, caches: Sequence[Tensor]) -> BlockViews:
        """Return the views of each layer's parts, for :class:`kvplug.engine.PageBlocks` and
        :meth:`kvplug.transport.Pipe.send_blocks`.

        ``caches``: one tensor for each layer, in the order of the layers.
        """
        return BlockViews([[part for part in self.views(cache) if part is not None] for cache in caches])


def _is_size(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1


def _size_of(dimension: str, sizes: Mapping[str, int]) -> int:
    return 2 * sizes["D"] if dimension == "KD" else sizes[dimension]
