"""Memory of pages outside a store: where a page's bytes are copied from, and where they go to."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.copying import address_of, copy_bytes
from kvplug.transport.block_views import PartPlace
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.places import PagePlaces

if TYPE_CHECKING:
    from torch import Tensor

_LOCK_FREE_BYTES: Final = 256 << 10  # rows that are copied without the interpreter's lock, as they are hashed


@attrs.frozen(eq=False)
class PageRows:
    """Rows of bytes in one buffer: one row for each page, all of one length.

    Stores keep pages in rows, and executors read them into rows.

    Raises:
        LayoutError: a row reaches out of the buffer.
    """

    buffer: memoryview
    """Flat bytes, contiguous."""
    offsets: Sequence[int]
    """Where in the buffer each row begins."""
    nbytes: int
    """Bytes of a row."""

    def __attrs_post_init__(self) -> None:
        if (
            self.offsets
            and not 0 <= min(self.offsets) <= max(self.offsets) <= self.buffer.nbytes - self.nbytes
        ):
            raise LayoutError(
                f"rows of {self.nbytes} bytes at {min(self.offsets)} to {max(self.offsets)} do not lie in"
                f" {self.buffer.nbytes} bytes"
            )

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def address(self) -> int:
        """Where the buffer begins in this process's memory. It must stay alive."""
        return address_of(self.buffer)

    @classmethod
    def dense(cls, buffer: memoryview, count: int, nbytes: int) -> PageRows:
        """Rows one after the other from the buffer's beginning on."""
        return cls(buffer, range(0, count * nbytes, nbytes) if nbytes else (0,) * count, nbytes)

    def row(self, index: int) -> memoryview:
        """The bytes of one row."""
        begin = self.offsets[index]
        return self.buffer[begin : begin + self.nbytes]

    def columns(self, begin: int, end: int) -> PageRows:
        """Bytes ``begin`` to ``end`` of every row."""
        return PageRows(self.buffer, [offset + begin for offset in self.offsets], end - begin)

    def __getitem__(self, part: slice) -> PageRows:
        """Some of the rows."""
        return PageRows(self.buffer, self.offsets[part], self.nbytes)

    def as_tensor(self) -> Tensor | None:
        """The rows as one uint8 tensor [rows, bytes] over the same memory; ``None`` if they are not evenly
        spaced."""
        import torch

        if not len(self) or not self.nbytes:
            return None
        first = self.offsets[0]
        step = self.offsets[1] - first if len(self) > 1 else self.nbytes
        if step < self.nbytes or any(at != first + index * step for index, at in enumerate(self.offsets)):
            return None
        flat = torch.frombuffer(self.buffer, dtype=torch.uint8, offset=first)
        return flat.as_strided((len(self), self.nbytes), (step, 1))


class PageMemory(abc.ABC):
    """Memory for several pages of one format, which belongs to the caller of a store.

    A store copies from it (:meth:`gather`) while it puts, and into it (:meth:`scatter`) while it gets, in any
    thread. It never touches it after the job has settled."""

    format: PageFormat
    """Of all these pages."""
    device: str = "cpu"
    """Where it is: "cpu", "cuda:1". A store that takes memory of the CPU only is never given another."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of pages."""

    @abc.abstractmethod
    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        """Copy pages ``first`` and on into ``rows``, one page a row.

        Args:
            rows: have the bytes of the given layers each.
            layers: consecutive; ``None``: all of them.

        Raises:
            LayoutError: the rows do not fit.
        """

    @abc.abstractmethod
    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        """The inverse of :meth:`gather`: into pages ``first`` and on."""

    def rows(self) -> PageRows | None:
        """The pages themselves, where their bytes already lie in rows; ``None``: they do not.

        A store may then read into them, or write from them, without a copy in between.
        """
        return None

    def places(self, first: int, count: int) -> PagePlaces | None:
        """Where pages ``first`` and on lie, for compiled code that copies them; ``None``: it cannot.

        Where it can, :meth:`gather` and :meth:`scatter` may not be called: a subclass that changes them
        changes this method as well.

        Raises:
            LayoutError: there are fewer pages.
        """
        return None

    def _check_count(self, first: int, count: int) -> None:
        if not 0 <= first <= first + count <= len(self):
            raise LayoutError(f"pages {first} to {first + count} of {len(self)}")

    def _check(self, first: int, rows: PageRows, layers: range | None) -> range:
        wanted = range(self.format.num_layers) if layers is None else layers
        self._check_count(first, len(rows))
        if wanted.step != 1 or not 0 <= wanted.start <= wanted.stop <= self.format.num_layers:
            raise LayoutError(f"{wanted} of {self.format.num_layers} layers")
        if rows.nbytes != len(wanted) * self.format.layer_nbytes:
            raise LayoutError(
                f"rows of {rows.nbytes} bytes for {len(wanted)} layers of {self.format.layer_nbytes} bytes"
            )
        return wanted


class PageBuffers(PageMemory):
    """Pages that lie in rows of one buffer.

    >>> from kvplug.transport.store.format import opaque_format
    >>> pages = PageBuffers.empty(opaque_format(4), 2)
    >>> pages.rows().row(1)[:] = b"abcd"
    >>> copied = PageBuffers.empty(pages.format, 1)
    >>> pages.gather(1, copied.rows())
    >>> bytes(copied.rows().row(0))
    b'abcd'
    """

    def __init__(self, form: PageFormat, rows: PageRows) -> None:
        """Raises LayoutError: the rows have not the length of a page."""
        if rows.nbytes != form.nbytes:
            raise LayoutError(f"rows of {rows.nbytes} bytes for pages of {form.nbytes}")
        self.format = form
        self._rows = rows

    @classmethod
    def empty(cls, form: PageFormat, count: int) -> PageBuffers:
        """New memory for ``count`` pages."""
        return cls(form, PageRows.dense(memoryview(bytearray(count * form.nbytes)), count, form.nbytes))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> PageRows:
        return self._rows

    def places(self, first: int, count: int) -> PagePlaces | None:
        self._check_count(first, count)
        form, rows = self.format, self._rows[first : first + count]
        if not count or rows.buffer.readonly:
            return None
        address = rows.address
        bases = array("q")
        for layer in range(form.num_layers):
            bases.extend(address + layer * form.layer_nbytes + at for at, _ in form.spans)
        # each page is one block, and all of it one token
        parts = tuple(PartPlace(1, nbytes, (nbytes,), (1,), 1) for _, nbytes in form.spans)
        return PagePlaces(bases, parts, array("q", rows.offsets), 1, 1, 0, range(count))

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        mine = self._mine(first, rows, layers)
        for index in range(len(rows)):
            copy_bytes(rows.row(index), mine.row(index), _LOCK_FREE_BYTES)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        mine = self._mine(first, rows, layers)
        for index in range(len(rows)):
            copy_bytes(mine.row(index), rows.row(index), _LOCK_FREE_BYTES)

    def fill(self, source: PageMemory, first: int, layers: range) -> None:
        """Copy these layers of pages ``first`` and on of ``source`` into all pages, as :meth:`gather` of the
        source does. A store's own memory may do it faster."""
        step = self.format.layer_nbytes
        source.gather(first, self._rows.columns(layers.start * step, layers.stop * step), layers)

    def _mine(self, first: int, rows: PageRows, layers: range | None) -> PageRows:
        wanted, step = self._check(first, rows, layers), self.format.layer_nbytes
        return self._rows[first : first + len(rows)].columns(wanted.start * step, wanted.stop * step)


class PageViews(PageMemory):
    """Pages that lie in a buffer each, anywhere in this process's memory.

    >>> from kvplug.transport.store.format import opaque_format
    >>> pages = PageViews(opaque_format(4), [memoryview(bytearray(4)), memoryview(bytearray(b"abcd"))])
    >>> copied = PageBuffers.empty(pages.format, 1)
    >>> pages.gather(1, copied.rows())
    >>> bytes(copied.rows().row(0))
    b'abcd'
    """

    def __init__(self, form: PageFormat, views: Sequence[memoryview]) -> None:
        """``views``: of bytes, contiguous, one for each page. They keep their memory alive.

        Raises:
            LayoutError: one has not the length of a page, or is not contiguous bytes.
        """
        for view in views:
            if view.nbytes != form.nbytes or view.itemsize != 1 or view.ndim != 1 or not view.contiguous:
                raise LayoutError(
                    f"a view of {view.nbytes} bytes (format {view.format!r}, {view.ndim} axes) for a page of"
                    f" {form.nbytes} contiguous bytes"
                )
        self.format = form
        self._views = [view if view.format == "B" else view.cast("B") for view in views]

    def __len__(self) -> int:
        return len(self._views)

    def places(self, first: int, count: int) -> PagePlaces | None:
        self._check_count(first, count)
        form, views = self.format, self._views[first : first + count]
        if not count or not form.nbytes or any(view.readonly for view in views):
            return None
        at = array("q", map(address_of, views))
        base = min(at)
        bases = array("q")
        for layer in range(form.num_layers):
            bases.extend(base + layer * form.layer_nbytes + begin for begin, _ in form.spans)
        # as in PageBuffers, each page is one block, and all of it one token
        parts = tuple(PartPlace(1, nbytes, (nbytes,), (1,), 1) for _, nbytes in form.spans)
        return PagePlaces(bases, parts, array("q", [each - base for each in at]), 1, 1, 0, range(count))

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        begin, end = self._columns(first, rows, layers)
        for index in range(len(rows)):
            copy_bytes(rows.row(index), self._views[first + index][begin:end], _LOCK_FREE_BYTES)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        begin, end = self._columns(first, rows, layers)
        for index in range(len(rows)):
            copy_bytes(self._views[first + index][begin:end], rows.row(index), _LOCK_FREE_BYTES)

    def _columns(self, first: int, rows: PageRows, layers: range | None) -> tuple[int, int]:
        wanted, step = self._check(first, rows, layers), self.format.layer_nbytes
        return wanted.start * step, wanted.stop * step
