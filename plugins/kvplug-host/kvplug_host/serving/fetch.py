"""Pages on their way to a process that does not map the memory: over the pipe, straight from the slots."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvplug import ClosedError, KvplugError, PeerGoneError
from kvplug.transport import Deadline, JobEngine, Pipe, Transfer
from kvplug_host import protocol
from kvplug_host.pages.index import Entry
from kvplug_host.protocol import Pieces

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_AHEAD: Final = 2
"""Pieces that may be sent and not taken: they stay in their slots until then."""


class Fetch(JobEngine.Steps):
    """The pages of one request. Its steps run in the one thread that sends to this peer."""

    def __init__(
        self,
        request: int,
        entries: Sequence[Entry | None],
        pieces: Pieces,
        *,
        pipe: Pipe,
        memory: Tensor,
        deadline: Deadline,
        settled: Callable[[Fetch], None],
        failed: Callable[[str | None], None],
    ) -> None:
        """
        Args:
            entries: pinned; ``None``: a page that is not sent.
            memory: all slots, as bytes.
            settled: called once, when no slot is read any more.
            failed: the link has to end, and why; ``None``: the peer is gone.
        """
        self.request = request
        self.entries = entries
        self._pieces = pieces
        self._pipe = pipe
        self._memory = memory
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
        if self._next >= len(self._pieces) + 1:
            return None
        self._next += 1
        return self._next - 1

    def has_steps(self) -> bool:
        return self._next <= len(self._pieces)

    def run(self, step: int) -> None:
        """One piece; the last step tells that there are no more, and waits for what is under way."""
        is_last = step == len(self._pieces)
        try:
            if is_last:  # over the pipe: the channel may be faster than the last piece
                end = protocol.tag(self.request, step, 0, 0)
                self._transfers.append(self._pipe.send_tensor(end, timeout=self._deadline.remaining()))
            while self._transfers and (is_last or len(self._transfers) >= 2 * _AHEAD):
                self._transfers.popleft().wait(self._deadline.remaining())
            if not is_last and not self._is_cancelled:
                self._send(step)
                self._num_sent += 1
        except KvplugError as e:
            self._next = len(self._pieces) + 1
            gone = isinstance(e, PeerGoneError | ClosedError)
            self._failed(None if gone else f"it did not take its pages: {e}")
            is_last = True
        except Exception as e:
            _log.exception("sending pages failed")
            self._next = len(self._pieces) + 1
            self._failed(f"sending pages failed: {e}")
            is_last = True
        if is_last:
            self._settled(self)

    def _send(self, number: int) -> None:
        (begin, end), numbers = self._pieces.piece(number)
        there = [entry for at in numbers if (entry := self.entries[at]) is not None]
        if not there:
            return
        nbytes = end - begin
        views: list[Any] = [
            self._memory.as_strided((1, nbytes), (nbytes, 1), entry.offset + begin) for entry in there
        ]
        tag = protocol.tag(self.request, number, len(there), nbytes)
        self._transfers.append(self._pipe.send_tensor(tag, timeout=self._deadline.remaining()))
        self._transfers.append(self._pipe.send_blocks(views, (0,), timeout=self._deadline.remaining()))
