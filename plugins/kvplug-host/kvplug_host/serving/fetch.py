"""Pages on their way to a process that does not map the memory: over the pipe, straight from the slots."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Final

from kvplug.engine import BlockViews
from kvplug.transport import Deadline, JobEngine, Pipe, Transfer
from kvplug_host import protocol
from kvplug_host.link_end import failing
from kvplug_host.pages.index import Entry

_AHEAD: Final = 2
"""Pieces that may be sent and not taken: they stay in their slots until then."""

Views = Callable[[int, int, range, bool], BlockViews]


class Fetch(JobEngine.Steps):
    """The pages of one request. Its steps run in the one thread that sends to this peer."""

    def __init__(
        self,
        request: protocol.Fetch,
        entries: Sequence[Entry | None],
        *,
        pipe: Pipe,
        views: Views,
        deadline: Deadline,
        settled: Callable[[Fetch], None],
        failed: Callable[[str | None], None],
    ) -> None:
        """
        Args:
            entries: pinned; ``None``: a page that is not sent.
            views: returns the memory of all slots as blocks, for bytes of a page and of a row, rows of
                each page, and whether there is a view for each of these rows.
            settled: called once, when no slot is read any more.
            failed: the link has to end, and why; ``None``: the peer is gone.
        """
        self._request = request
        self._entries = entries
        self._pieces = request.pieces
        self._pipe = pipe
        self._views = views
        self._deadline = deadline
        self._settled = settled
        self._failed = failed
        self._next = 0
        self._is_cancelled = False
        self._num_sent = 0
        self._transfers: collections.deque[Transfer] = collections.deque()

    def cancel(self) -> None:
        """Send no more of it."""
        self._is_cancelled = True

    @property
    def is_sent(self) -> bool:
        """Whether all of it was sent."""
        return self._num_sent == len(self._pieces)

    def next_step(self) -> int | None:
        if not self.has_steps():
            return None
        self._next += 1
        return self._next - 1

    def has_steps(self) -> bool:
        return self._next <= len(self._pieces)

    def run(self, step: int) -> None:
        """One piece. The last step sends that there are no more, and waits for what is under way."""
        is_last = step == len(self._pieces)
        with failing(self._fail, "it did not take its pages"):
            if is_last:  # over the pipe: the channel may be faster than the last piece
                self._transfers.append(self._send_tag(step, 0))
            while self._transfers and (is_last or len(self._transfers) >= 2 * _AHEAD):
                self._transfers.popleft().wait(self._deadline.remaining())
            if not is_last and not self._is_cancelled:
                self._send(step)
                self._num_sent += 1
        if not self.has_steps():
            self._settled(self)

    def _fail(self, reason: str | None) -> None:
        self._failed(reason)
        self._pipe.abort()  # it reads no slot any more
        self._next = len(self._pieces) + 1

    def _send_tag(self, number: int, count: int) -> Transfer:
        tag = protocol.tag(self._request.id, number, count)
        return self._pipe.send_tensor(tag, timeout=self._deadline.remaining())

    def _send(self, number: int) -> None:
        rows, pages = self._pieces.piece(number)
        offsets = [entry.offset for page in pages if (entry := self._entries[page]) is not None]
        if offsets:
            request = self._request
            views = self._views(request.payload_bytes, request.row_bytes, rows, request.as_blocks)
            self._transfers.append(self._send_tag(number, len(offsets)))
            self._transfers.append(self._pipe.send_blocks(views, offsets, timeout=self._deadline.remaining()))
