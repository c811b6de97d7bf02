"""Pages out of a store in another process, over a pipe: received into memory of this process, verified there,
and only then copied to the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvplug import PeerGoneError
from kvplug.transport import (
    GetJob,
    JobTask,
    MissReason,
    PageCopy,
    PageRequest,
    PageRows,
    PageSeal,
    WireError,
)
from kvplug_host.jobs.get import Landing
from kvplug_host.protocol import Pieces

_SENT, _OTHER_SIZE = 1, 2
_ANSWER_S: Final = 10.0
"""How long the answer over the channel may come after the first piece over the pipe."""


class PipedGet(Landing):
    """One request. The thread that receives from the pipe copies its pieces."""

    def __init__(
        self,
        job: GetJob,
        pages: PageRequest,
        seal: PageSeal,
        discard: Callable[[int, MissReason], None],
        on_settled: Callable[[], None],
    ) -> None:
        super().__init__(job, pages, seal, discard)
        step = pages.series.format.layer_nbytes
        self.pieces = Pieces(
            tuple((layers.start * step, layers.stop * step) for layers in self.layers),
            tuple((numbers.start, numbers.stop) for numbers in self.ranges),
        )
        self._on_settled = on_settled
        self._copy: PageCopy | None = None
        self._answered = threading.Event()
        self._sent: list[bool] = []
        self._coming = 0

    def found(self, codes: bytes, headers: Sequence[bytes]) -> None:
        """Which pages are sent, and the headers of those that are there.

        Raises:
            WireError: these are not as many as there are pages.
        """
        there = sum(code in (_SENT, _OTHER_SIZE) for code in codes)
        if len(codes) != self.job.count or len(headers) != there:
            raise WireError(f"{len(codes)} pages and {len(headers)} headers came for {self.job.count} pages")
        self.check_headers(
            [index for index, code in enumerate(codes) if code in (_SENT, _OTHER_SIZE)], headers
        )
        for index, code in enumerate(codes):
            if code != _SENT:
                self.miss(index, MissReason.CORRUPT if code == _OTHER_SIZE else MissReason.ABSENT)
        self._sent = [code == _SENT for code in codes]
        for piece in range(len(self.pieces)):
            if any(self._sent[at] for at in self.pieces.piece(piece)[1]):
                self._coming += 1
            else:
                self.landed(piece // len(self.ranges))
        self._answered.set()
        if not self._coming:
            self.end(None)

    def rows_of(self, piece: int, rows: int, row_bytes: int) -> list[int]:
        """The pages of a piece that comes, which is so large.

        Raises:
            WireError: it is none of this request.
            PeerGoneError: the link has ended.
        """
        if not self._answered.wait(_ANSWER_S) or not self._sent:
            raise PeerGoneError("the store sends pages and does not say which")
        if piece >= len(self.pieces):
            raise WireError(f"piece {piece} came of a request with {len(self.pieces)}")
        (begin, end), numbers = self.pieces.piece(piece)
        sent = [at for at in numbers if self._sent[at]]
        if len(sent) != rows or end - begin != row_bytes:
            raise WireError(f"a piece of {rows} rows of {row_bytes} bytes came, which was not asked for")
        return sent

    def arrived(self, piece: int, sent: Sequence[int], buffer: memoryview, row_bytes: int) -> None:
        """A piece is there, one row after the other."""
        offsets = {at: row * row_bytes for row, at in enumerate(sent)}
        group, number = divmod(piece, len(self.ranges))

        layers = self.layers[group]

        def load(run: range) -> list[MissReason | None] | None:
            if self._copy is None:
                self._copy = PageCopy(self.pages.memory, self.seal)
            rows = PageRows(buffer, [offsets[at] for at in run], row_bytes)
            self._copy.use(run.start, rows, self.headers[run.start : run.stop], layers)
            return self._copy.load(run, layers)

        try:
            self.land(self.ranges[number], load)
        except JobTask.OverError:
            return
        except MemoryError:
            self.end(MissReason.NO_MEMORY)
        self.landed(group)
        self._coming -= 1
        if not self._coming:
            self.end(None)

    def all_sent(self) -> None:
        """The store sends no more of it, and the answer is there."""
        self._answered.wait(_ANSWER_S)
        if self._coming and any(each is JobTask.UNKNOWN for each in self.results):
            self.end(MissReason.STORE_GONE)

    def end(self, reason: MissReason | None) -> bool:
        is_first = super().end(reason)
        if reason in (MissReason.STORE_GONE, MissReason.CLOSED):
            self._answered.set()
        return is_first

    def settled(self) -> None:
        self._on_settled()
