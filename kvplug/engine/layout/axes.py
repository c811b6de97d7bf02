"""A layout: a string of axis letters and a size for each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvplug.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

LETTERS = "LKBTHD"
"""Every axis there is."""


@functools.lru_cache(maxsize=256)
def dimensions(axes: str) -> tuple[str, ...]:
    """The dimensions of a tensor with these axes: one letter each, or ``"KD"`` where they are packed.

    Raises:
        LayoutError: not an axis string.
    """
    unknown = sorted(set(axes) - set(LETTERS))
    if unknown or not axes:
        raise LayoutError(f"{axes!r} is no axis string: its letters are some of {LETTERS}, not {unknown}")
    if len(set(axes)) != len(axes):
        raise LayoutError(f"{axes!r} is no axis string: a letter comes twice")
    before, packed, after = axes.partition("KD")
    return (*before, *((packed,) if packed else ()), *after)


def _ordered(sizes: Mapping[str, int] | tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The sizes as a value that can be hashed, equal whatever order they were given in."""
    return tuple(sorted(dict(sizes).items(), key=lambda pair: LETTERS.find(pair[0])))


@attrs.frozen
class KVLayout:
    """How one tensor of a paged KV cache lies in memory.

    ``KVLayout("BHTKD", {"T": 16, "H": 3, "D": 64})``. The number of blocks (``B``) may be left out, and
    is then whatever a tensor has; ``K`` is 2 and need not be said.

    >>> layout = KVLayout("BHTKD", {"B": 1000, "T": 16, "H": 3, "D": 64})
    >>> layout.shape
    (1000, 3, 16, 128)
    >>> layout.block_size, layout.is_packed
    (16, True)

    Raises:
        LayoutError: not the axes of a KV cache, or a size that is missing, too much, or not positive.
    """

    axes: str
    """One letter for each axis of the tensor, outermost first: B blocks, T tokens in a block, K keys and
    values (2), H heads, D head size."""
    _sizes: tuple[tuple[str, int], ...] = attrs.field(converter=_ordered)
    """Size of each axis by its letter: a mapping, or pairs."""
    block_format: str = attrs.field(default="", kw_only=True)
    """Name of an attention kernel's own order inside a block; the axes then give its size, not its order.

    Such blocks are moved whole, into a cache of the same layout, format included. Empty: the axes say all.
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
                raise LayoutError(f"a size is given for {letter!r}, which is no axis of {self.axes!r}")
            if not _is_size(size):
                raise LayoutError(f"the size of axis {letter} must be a positive integer, got {size!r}")
        if sizes.get("K", 2) != 2:
            raise LayoutError(f"axis K is a key and a value: its size is 2, not {sizes['K']}")
        unsaid = [letter for letter in self.axes if letter not in sizes and letter != "B"]
        if unsaid:
            raise LayoutError(f"layout {self.axes!r} needs the sizes of {', '.join(unsaid)} too")
        object.__setattr__(self, "_sizes", _ordered(sizes))

    # -- asking --------------------------------------------------------------------------------

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letter to size; ``B`` only where it is known."""
        return dict(self._sizes)

    @property
    def num_blocks(self) -> int | None:
        """``None`` where the layout leaves it open."""
        return self.sizes.get("B")

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.sizes["T"]

    @property
    def num_kv_heads(self) -> int:
        """1 for latent attention."""
        return self.sizes.get("H", 1)

    @property
    def head_size(self) -> int:
        """Numbers in one head of one token."""
        return self.sizes["D"]

    @property
    def num_layers(self) -> int | None:
        """Layers in one tensor; ``None`` where each layer has its own."""
        return self.sizes.get("L")

    @property
    def has_values(self) -> bool:
        """Whether there are values beside the keys: not for latent attention."""
        return "K" in self.axes

    @property
    def is_packed(self) -> bool:
        """Whether keys and values share one dimension of the tensor."""
        return "KD" in self.axes

    @property
    def granule(self) -> int:
        """Tokens that can be moved alone: one, or a block where its inside is a kernel's own."""
        return self.block_size if self.block_format else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor.

        Raises:
            LayoutError: the number of blocks is left open.
        """
        if self.num_blocks is None:
            raise LayoutError(f"layout {self.axes!r} leaves the number of blocks open: it has no shape")
        return tuple(_size_of(dimension, self.sizes) for dimension in dimensions(self.axes))

    # -- checking ------------------------------------------------------------------------------

    def check_range(self, start: int, end: int) -> None:
        """Return if tokens ``start`` to ``end`` (exclusive) of a sequence can be moved without the others.

        Raises:
            LayoutError: they begin or end inside a block that only its kernel can read.
        """
        if start % self.granule or end % self.granule:
            raise LayoutError(
                f"tokens {start} to {end} are no whole blocks of {self.block_size}, and the inside of a block"
                f" is in the kernel's own order ({self.block_format})"
            )

    def check(self, tensor: Tensor) -> None:
        """Return if the tensor lies in memory as this layout says.

        Shape and strides are both compared: the dimensions must be in the order of memory, outermost
        first, and no two elements may share memory. Gaps (a view of a larger tensor) are fine.

        Raises:
            LayoutError: names the axis, what was expected and what is there.
        """
        names = dimensions(self.axes)
        self.check_shape(tuple(tensor.shape))
        strides = tuple(tensor.stride())
        named = [
            (name, size, stride)
            for name, size, stride in zip(names, tensor.shape, strides, strict=True)
            if size > 1  # the stride of a dimension of one element says nothing
        ]
        for name, size, stride in named:
            if stride == 0:
                raise LayoutError(f"axis {name}: its {size} elements share memory (an expanded tensor)")
        in_memory = sorted(named, key=lambda dim: -dim[2])
        for (expected, *_), (found, *_) in zip(named, in_memory, strict=True):
            if expected != found:
                order = "".join(name for name, *_ in in_memory)
                raise LayoutError(
                    f"axis {expected}: layout {self.axes!r} expects it next in memory, and the strides"
                    f" {strides} put {found} there (memory order {order}); give the layout of the memory,"
                    f" and a tensor permuted to it"
                )
        room = 0  # elements from the first to the last of the dimensions inside
        for name, size, stride in reversed(named):
            if stride <= room:
                raise LayoutError(
                    f"axis {name}: layout {self.axes!r} expects a stride of more than {room} elements, got"
                    f" {stride}: elements would share memory"
                )
            room += (size - 1) * stride

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Return if a tensor of this shape can be one of this layout. :meth:`check` looks at strides too.

        Raises:
            LayoutError: names the axis, what was expected and what is there.
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


def _is_size(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1


def _size_of(dimension: str, sizes: Mapping[str, int]) -> int:
    return 2 * sizes["D"] if dimension == "KD" else sizes[dimension]
