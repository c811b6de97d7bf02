"""A put into a store in another process: the store answers which pages it lacks, and these are sent."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvplug.transport import Job, MissReason, PageRequest, PageSeal, PutReason
from kvplug_host import protocol
from kvplug_host.client.put_turns import PutTurns
from kvplug_host.client.requests import Requests
from kvplug_host.jobs import PUT_STEP_BYTES, Put, ranges_of

_AHEAD: Final = 3
"""Requests of one put that are under way at the same time."""
_ANNOUNCED_BYTES: Final = 4 * PUT_STEP_BYTES
"""Of the pages of a range, which are sent in several steps."""


Send = Callable[[int, int, int, int, Callable[[memoryview], None]], None]


class _Piece(NamedTuple):
    """Pages that are sent in one message."""

    request: int
    first: int
    """The number of the first page in its request."""
    row_bytes: int
    """Bytes of a page and its header."""
    pages: list[int]


class RemotePut(Put):
    """Ranges of pages: each is announced, gathered and sent, and answered, a few at the same time."""

    is_put = True

    def __init__(
        self,
        job: Job[PutReason | None],
        pages: PageRequest,
        seal: PageSeal,
        *,
        requests: Requests,
        turns: PutTurns,
        send: Send,
        again: Callable[[RemotePut], object],
    ) -> None:
        """
        Args:
            send: ``send(request, first, rows, row_bytes, fill)``: rows over the pipe, filled by ``fill``;
                ``first`` counts in the pages of the request.
            again: has the steps of this task run.
        """
        super().__init__(job, pages, seal)
        self._requests, self._turns, self._send, self._again = requests, turns, send, again
        form = pages.series.format
        row_bytes = form.nbytes + max(
            (seal.header_length(form, identity) for identity in pages.identities), default=0
        )
        least_bytes = -(-_ANNOUNCED_BYTES // protocol.MAX_KEYS)
        self._ranges = deque(ranges_of(job.count, max(row_bytes, least_bytes), _ANNOUNCED_BYTES))
        self._announced: dict[int, Sequence[int]] = {}
        """The numbers of the pages of each request under way. Each of them has a turn, which is given back by
        what removes it from here."""
        self._pieces: list[_Piece] = []
        """What is sent, in as many steps."""

    # -- the three phases ----------------------------------------------------------------------

    def announce(self) -> None:
        """Announce more ranges, or end if all are answered."""
        while True:
            with self.lock:
                if self.is_over:
                    return
                if not self._ranges:
                    finished = not self._announced
                    break
                if len(self._announced) >= _AHEAD or not self._turns.take(self.announce):
                    return
                request, wanted = self._requests.new_number(), []
                for at in self._ranges.popleft():
                    if self.is_forgotten(self.pages.keys[at]):
                        self.results[at] = PutReason.CANCELLED
                    else:
                        wanted.append(at)
                # With the lock: a removal comes before all of this, or after the request.
                if wanted:
                    self._announced[request] = wanted
                    sent = self._announce(request, wanted)
            if not wanted:
                self._turns.give_back(1)
            elif not sent:
                self.end(self._requests.over or MissReason.STORE_GONE)
        if finished:
            self.end(None)

    def _announce(self, request: int, wanted: Sequence[int]) -> bool:
        """Returns whether it was sent."""
        pages = self.pages

        def take(answer: protocol.Results) -> None:
            protocol.check_count(answer.codes, len(wanted))
            if answer.is_last:
                self._kept(request, answer.codes)
            else:
                self._answered(request, answer.codes)

        put = protocol.Put(
            id=request,
            keys=b"".join(pages.keys[at] for at in wanted),
            identities=[pages.identities[at] for at in wanted],
            format=pages.series.format,
            shard=pages.series.shard,
            checksums=self.seal.checksums,
            timeout_s=protocol.for_wire(self.job.deadline.remaining()),
        )
        return self._requests.listen(put, take, self)

    def _answered(self, request: int, codes: Sequence[int]) -> None:
        """Take the first answer to a request: for each page :data:`~protocol.SEND`, or its result."""
        with self.lock:
            numbers = self._announced.get(request)
            if numbers is None or self.is_over:
                return
            known = [(at, code) for at, code in zip(numbers, codes, strict=True) if code != protocol.SEND]
            results = protocol.results_in(protocol.PUT_RESULTS, [code for _, code in known])
            for (at, _), result in zip(known, results, strict=True):
                self.results[at] = result
            self._pieces.extend(self._cut(request, numbers, codes))
        if protocol.SEND in codes:
            self._again(self)

    def _cut(self, request: int, numbers: Sequence[int], codes: Sequence[int]) -> Iterator[_Piece]:
        """The pages that are to be sent, in messages whose rows have one length."""
        form, identities = self.pages.series.format, self.pages.identities

        def row_bytes(first: int) -> int:
            return form.nbytes + self.seal.header_length(form, identities[numbers[first]])

        wanted = [index for index, code in enumerate(codes) if code == protocol.SEND]
        for nbytes, group in itertools.groupby(wanted, key=row_bytes):
            run = list(group)
            for part in ranges_of(len(run), form.nbytes, PUT_STEP_BYTES):
                first = run[part.start]
                yield _Piece(request, first, nbytes, [numbers[run[index]] for index in part])

    def _kept(self, request: int, codes: Sequence[int]) -> None:
        """Take the last answer to a request: the results of its pages."""
        with self.lock:
            numbers = self._announced.pop(request, None)
            if numbers is None:
                return
            if not self.is_over:
                for at, result in zip(numbers, protocol.results_in(protocol.PUT_RESULTS, codes), strict=True):
                    self.results[at] = result
        self._turns.give_back(1)
        self.announce()

    # -- a step: gather and send ---------------------------------------------------------------

    def has_steps(self) -> bool:
        return not self.is_over and self._begun < len(self._pieces)

    def do(self, step: int) -> None:
        piece = self._pieces[step]
        count, row_bytes = len(piece.pages), piece.row_bytes

        def fill(rows: memoryview) -> None:
            self.gather(rows, dict(zip(piece.pages, range(0, count * row_bytes, row_bytes), strict=True)))

        self._send(piece.request, piece.first, count, row_bytes, fill)

    # -- the end -------------------------------------------------------------------------------

    def end(self, reason: MissReason | None) -> bool:
        is_first = super().end(reason)
        with self.lock:  # no request is added any more
            announced, self._announced = self._announced, {}
        for request in announced:
            self._requests.notify(protocol.Cancel(id=request))
        if announced:
            self._turns.give_back(len(announced))
        return is_first
