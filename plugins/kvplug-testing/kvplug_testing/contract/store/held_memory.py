"""Memory whose copies can be held up, to look at a request in its middle."""

from __future__ import annotations

import threading

from kvplug.transport import PageBuffers, PageFormat, PageMemory, PageRows

HOLDS_UP_S = 60.0
"""How long a copy is held up at most."""


class HeldMemory(PageMemory):
    """Pages without rows of their own. A copy of page ``at`` waits until :attr:`go_on` is set.

    It waits in the middle: the first half of the layers, or of the bytes, has been copied by then.
    """

    def __init__(self, pages: PageMemory, at: int = 0) -> None:
        """``pages``: memory whose pages lie in rows."""
        assert isinstance(pages, PageBuffers)
        self.format: PageFormat = pages.format
        self.inner = pages
        self._at = at
        self.began, self.go_on = threading.Event(), threading.Event()
        self.num_copies = 0
        """Copies that have ended."""

    def __len__(self) -> int:
        return len(self.inner)

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._move(first, rows, layers, into_rows=True)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._move(first, rows, layers, into_rows=False)

    def _move(self, first: int, rows: PageRows, layers: range | None, *, into_rows: bool) -> None:
        wanted = self._check(first, rows, layers)
        step = self.format.layer_nbytes
        mine = self.inner.rows()[first : first + len(rows)].columns(wanted.start * step, wanted.stop * step)
        half = rows.nbytes // 2
        for begin, end in ((0, half), (half, rows.nbytes)):
            for index in range(len(rows)):
                here, there = mine.row(index)[begin:end], rows.row(index)[begin:end]
                if into_rows:
                    there[:] = here
                else:
                    here[:] = there
            if not begin and first <= self._at < first + len(rows):
                self.began.set()
                self.go_on.wait(HOLDS_UP_S)
        self.num_copies += 1
