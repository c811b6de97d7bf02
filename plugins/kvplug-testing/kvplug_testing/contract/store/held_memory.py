"""Memory whose copies can be held up, to look at a request in its middle."""

from __future__ import annotations

import threading
from typing import Self

import attrs

from kvplug.transport import PageBuffers, PageFormat, PageMemory, PageRequest, PageRows
from kvplug_testing import waits
from kvplug_testing.contract.store.pages import Batch

HOLDS_UP_S = 60.0
"""How long a copy is held up at most."""


class HeldMemory(PageMemory):
    """Pages without rows of their own. A copy of page ``at`` waits until :attr:`go_on` is set.

    It waits in the middle: the first half of the layers, or of the bytes, has been copied by then. At the end
    of a ``with`` block it goes on.
    """

    def __init__(self, pages: PageMemory, at: int = 0) -> None:
        """``pages``: memory whose pages lie in rows."""
        assert isinstance(pages, PageBuffers)
        self.format: PageFormat = pages.format
        self.inner = pages
        self._at = at
        self.began, self.go_on = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()

    def wait_begun(self) -> None:
        """Wait until the copy is held up."""
        assert self.began.wait(waits.patience_s), "the copy of a page does not begin"

    def __len__(self) -> int:
        return len(self.inner)

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._copy(first, self._mine(first, rows, layers), rows)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._copy(first, rows, self._mine(first, rows, layers))

    def _mine(self, first: int, rows: PageRows, layers: range | None) -> PageRows:
        wanted, step = self._check(first, rows, layers), self.format.layer_nbytes
        pages = self.inner.rows()[first : first + len(rows)]
        return pages.columns(wanted.start * step, wanted.stop * step)

    def _copy(self, first: int, source: PageRows, target: PageRows) -> None:
        half = source.nbytes // 2
        for part in (slice(half), slice(half, None)):
            for index in range(len(source)):
                target.row(index)[part] = source.row(index)[part]
            if part.start is None and first <= self._at < first + len(source):
                self.began.set()
                self.go_on.wait(HOLDS_UP_S)


def held_request(pages: Batch, at: int = 0, *, filled: bool = False) -> tuple[PageRequest, HeldMemory]:
    """A request whose copy of one page is held up."""
    request = pages.filled() if filled else pages.empty()
    memory = HeldMemory(request.memory, at)
    return attrs.evolve(request, memory=memory), memory
