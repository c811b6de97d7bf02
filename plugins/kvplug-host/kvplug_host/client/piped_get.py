"""Pages out of a store in another process, over a pipe.

They are received into the caller's blocks and verified there. Where these do not lie as a pipe needs it,
pages are received into memory of this process, and copied when they were found to be right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug.net.wire import memory_of_writable
from kvplug.transport import (
    GetJob,
    JobTask,
    MissReason,
    PageCopy,
    PageRequest,
    PageRows,
    PageSeal,
    Pipe,
    WireError,
)
from kvplug_host import protocol
from kvplug_host.client.requests import Requests
from kvplug_host.jobs import Landing, runs_of

_ANSWER_S: Final = 10.0
"""How long the answer over the channel may come after the first piece over the pipe."""
_LOOK_S: Final = 0.1
"""How often a thread that waits for a piece checks whether the job is over, and its memory the caller's."""


class _Piece:
    """One message that comes."""

    def __init__(self, pipe: Pipe, layers: range, pages: Sequence[int]) -> None:
        self.pipe = pipe
        self.layers = layers
        self.pages = pages
        self.is_here = False
        """It was received."""


class PipedGet(Landing):
    """One request. The thread that receives from the pipe verifies its pieces."""

    def __init__(
        self,
        job: GetJob,
        pages: PageRequest,
        seal: PageSeal,
        wrong: Callable[[bytes, MissReason], None],
        requests: Requests,
        *,
        fills_blocks: bool = True,
    ) -> None:
        """
        Args:
            wrong: called with the key of a page that is wrong, and why.
            fills_blocks: :attr:`Pipe.fills_blocks`. If it is not set, only a piece of one block is received
                into the caller's memory: a pipe has other ways than blocks for it.
        """
        super().__init__(job, pages, seal)
        self._wrong = wrong
        form, block_bytes = pages.series.format, pages.memory.block_bytes
        if not fills_blocks and len(self.ranges[0]) * len(self.layers[0]) * form.layer_nbytes != block_bytes:
            block_bytes = 0
        self._requests = requests
        self._as_blocks = block_bytes > 0
        row_bytes = block_bytes or form.layer_nbytes
        self.request = protocol.Fetch(
            id=requests.new_number(),
            keys=b"".join(pages.keys),
            payload_bytes=form.nbytes,
            row_bytes=row_bytes,
            rows=len(self.layers[0]) * form.layer_nbytes // row_bytes,
            as_blocks=self._as_blocks,
            pages=len(self.ranges[0]),
            timeout_s=protocol.for_wire(job.deadline.remaining()),
            traceparent=pages.traceparent,
        )
        self._pieces = self.request.pieces
        self._copy: PageCopy | None = None
        self._codes = b""
        self._came: list[bytes] = []
        self._answered = threading.Event()
        self._sent: list[bool] = []
        self._coming = 0
        self._next = 0
        """The first piece that may come."""
        self._piece: _Piece | None = None
        """The latest."""

    def discard(self, index: int, reason: MissReason) -> None:
        self._wrong(self.pages.keys[index], reason)

    def found(self, answer: protocol.Fetched) -> None:
        """Take an answer: which of the next pages are sent, and their headers.

        Raises:
            WireError: in total they are not as many as the pages.
        """
        self._codes += answer.codes
        self._came += answer.headers
        codes, headers = self._codes, self._came
        if not answer.is_last and len(codes) < self.job.count:
            return
        protocol.check_count(codes, self.job.count)
        protocol.check_count(headers, self.job.count)
        there = [index for index, code in enumerate(codes) if code != protocol.ABSENT_PAGE]
        self.check_headers(there, [headers[index] for index in there])
        for index, code in enumerate(codes):
            if code != protocol.SENT:
                self.miss(index, MissReason.ABSENT if code == protocol.ABSENT_PAGE else MissReason.CORRUPT)
        self._sent = [code == protocol.SENT for code in codes]
        for piece in range(len(self._pieces)):
            if any(self._sent[at] for at in self._pieces.piece(piece)[1]):
                self._coming += 1
            else:
                self.landed(piece // len(self.ranges))
        self._answered.set()
        if not self._coming:
            self.end(None)

    def arrived(self, pipe: Pipe, piece: int, count: int) -> None:
        """Receive a piece, with so many pages.

        Raises:
            WireError: it does not belong to this request.
            PeerGoneError: the link has ended.
            KvplugError: the pipe cannot be used any more.
        """
        if not self._answered.wait(_ANSWER_S) or not self._sent:
            raise PeerGoneError("the store sends pages, and has not answered which")
        if not self._next <= piece < len(self._pieces):  # each comes once
            raise WireError(f"piece {piece} of {len(self._pieces)} came where piece {self._next} is the next")
        self._next = piece + 1
        group, number = divmod(piece, len(self.ranges))
        sent = [at for at in self.ranges[number] if self._sent[at]]
        if len(sent) != count:
            raise WireError(f"a piece of {count} pages came, which was not requested")
        self._piece = _Piece(pipe, self.layers[group], sent)
        reason = self.attempt(piece)
        if not self._piece.is_here:  # the job is over, or its memory cannot be used
            self._stage(self._piece)
        if reason is not None:
            self.end(reason)
        self.landed(group)  # releases no layers of a job that has ended
        self._coming -= 1
        if not self._coming:
            self.end(None)

    def do(self, step: int) -> None:
        piece = self._piece
        assert piece is not None
        if not self._receive_blocks(piece):
            self._receive_rows(piece)

    def _receive_blocks(self, piece: _Piece) -> bool:
        """Receive straight into the caller's blocks. Returns whether that was tried: the message stays if a
        page is known to be missed.

        Raises:
            JobTask.OverError: the job has ended.
            CopyError: the memory cannot be used.
            KvplugError: the pipe's.
        """
        pages, layers, memory = piece.pages, piece.layers, self.pages.memory
        if not self._as_blocks or any(self.results[at] is not JobTask.UNKNOWN for at in pages):
            return False
        error: KvplugError | None = None
        reasons: dict[int, MissReason | None] = {}
        with self.copying(), memory.hold(range(pages[0], pages[-1] + 1)):
            copy = self._prepared()
            views, block_ids = memory.blocks(pages, layers)
            try:
                while not piece.is_here and not self.is_over:
                    piece.is_here = _receives(piece.pipe, views, block_ids)
            except KvplugError as e:
                error = e
            if piece.is_here:
                begun = time.monotonic()
                for run in runs_of(pages):
                    reasons |= zip(run, copy.check(run, layers) or (), strict=False)
                if self.seal.checksums:
                    self.job.verify_seconds += time.monotonic() - begun
            else:
                for page in pages:
                    copy.clear(page, layers)
        if error is not None:
            raise error
        for page, reason in reasons.items():
            if reason is not None:
                self.miss(page, reason)
        return True

    def _receive_rows(self, piece: _Piece) -> None:
        """Receive into memory of this process, then copy what is right. Raises as :meth:`_receive_blocks`."""
        layers, pages = piece.layers, piece.pages
        rows, index = self._stage(piece), {at: row for row, at in enumerate(pages)}

        def load(run: range) -> list[MissReason | None] | None:
            copy = self._prepared()
            part = rows[index[run.start] : index[run.stop - 1] + 1]
            copy.use(run.start, part, self.headers[run.start : run.stop], layers)
            return copy.load(run, layers)

        for run in runs_of(pages):
            self.land(run, load)

    def _stage(self, piece: _Piece) -> PageRows:
        """Receive a piece into memory of this process: a row for each page."""
        import torch

        row_bytes = len(piece.layers) * self.pages.series.format.layer_nbytes
        shape = (1, len(piece.pages), row_bytes)
        if self._as_blocks:
            shape = (row_bytes // self.request.row_bytes, len(piece.pages), self.request.row_bytes)
        received: Any = piece.pipe.recv_tensor(torch.empty(shape, dtype=torch.uint8), timeout=None)
        piece.is_here = True
        rows = received.transpose(0, 1).contiguous()
        return PageRows.dense(memory_of_writable(rows), len(piece.pages), row_bytes)

    def _prepared(self) -> PageCopy:
        if self._copy is None:
            self._copy = PageCopy(self.pages.memory, self.seal)
            if self._as_blocks:
                self._copy.expect(0, self.headers)
        return self._copy

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
        self._requests.notify(protocol.Cancel(id=self.request.id))


def _receives(pipe: Pipe, views: Any, block_ids: Sequence[int]) -> bool:
    """Whether a message was received within a moment. Raises what a pipe raises."""
    try:
        pipe.recv_blocks(views, block_ids, timeout=_LOOK_S)
        return True
    except TimeoutError:
        return False
