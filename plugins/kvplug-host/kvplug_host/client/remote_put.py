"""A put into a store in another process: the store says which pages it lacks, and these go over the pipe."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kvplug.transport import (
    Job,
    MissReason,
    PageCopy,
    PageRequest,
    PageRows,
    PageSeal,
    PutReason,
    Usage,
    WireError,
)
from kvplug_host import protocol
from kvplug_host.client.requests import Requests
from kvplug_host.jobs.put import Put
from kvplug_host.jobs.steps import PUT_STEP_BYTES, ranges_of, runs_of
from kvplug_host.protocol import Op

_AHEAD: Final = 3
"""Ranges of pages for which the store holds slots at the same time."""


class Reserved:
    """What all puts of one end have asked the store to receive and have not sent. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._waiting: dict[RemotePut, None] = {}

    @property
    def most_bytes(self) -> int:
        """The most, or one page."""
        return self._most_bytes

    def take(self, nbytes: int, put: RemotePut) -> bool:
        """Whether the put may ask for so many bytes now; else it is called when there may be room."""
        with self._lock:
            if self._bytes and self._bytes + nbytes > self._most_bytes:
                self._waiting[put] = None
                return False
            self._bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """So many bytes were sent, or will not be. The caller holds no lock of a put."""
        with self._lock:
            self._bytes -= nbytes
            waiting, self._waiting = self._waiting, {}
        for put in waiting:
            put.ask()


Send = Callable[[int, int, int, int, Callable[[memoryview], None]], None]


class RemotePut(Put):
    """Ranges of pages: each is asked for, gathered and sent, and answered, a few at the same time."""

    is_put = True

    def __init__(
        self,
        job: Job[PutReason | None],
        pages: PageRequest,
        seal: PageSeal,
        *,
        requests: Requests,
        reserved: Reserved,
        send: Send,
        note_usage: Callable[[Usage], None],
        again: Callable[[RemotePut], object],
    ) -> None:
        """
        Args:
            send: ``send(request, first, rows, row_bytes, fill)``: rows over the pipe, filled by ``fill``;
                ``first`` counts in the pages of the request.
            note_usage: called with what the store says of its usage.
            again: has the steps of this task run.
        """
        super().__init__(job, pages)
        self._seal = seal
        self._copy: PageCopy | None = None
        self._requests, self._send, self._note_usage, self._again = requests, send, note_usage, again
        form = pages.series.format
        self._row_bytes = form.nbytes + max(
            (seal.header_length(form, identity) for identity in pages.identities), default=0
        )
        step_bytes = min(PUT_STEP_BYTES, reserved.most_bytes)
        self._ranges = deque(ranges_of(job.count, self._row_bytes, step_bytes))
        self._reserved = reserved
        self._taken: dict[int, int] = {}
        """Bytes that each request has reserved."""
        self._asked: dict[int, Sequence[int]] = {}
        """The numbers of the pages of each request under way."""
        self._ready: deque[tuple[int, list[int]]] = deque()
        """Requests, and those of their pages that are to be sent."""
        self._steps: dict[int, tuple[int, list[int]]] = {}
        self._numbers = itertools.count()

    # -- the three phases ----------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for more ranges, or end if there are none."""
        while True:
            with self.lock:
                if self.is_over:
                    return
                if len(self._asked) >= _AHEAD or not self._ranges:
                    finished = not self._asked and not self._ranges
                    break
                nbytes = len(self._ranges[0]) * self._row_bytes
                if not self._reserved.take(nbytes, self):
                    return
                request, wanted = self._requests.new_number(), []
                self._taken[request] = nbytes
                for at in self._ranges.popleft():
                    if self.is_forgotten(self.pages.keys[at]):
                        self.results[at] = PutReason.CANCELLED
                    else:
                        wanted.append(at)
                # With the lock: a removal comes before all of this, or after the request.
                if wanted:
                    self._asked[request] = wanted
                    sent = self._ask(request, wanted)
            if not wanted:
                self._give_back([request])
            elif not sent:
                self.end(self._requests.over or MissReason.STORE_GONE)
        if finished:
            self.end(None)

    def _give_back(self, requests: Iterable[int]) -> None:
        nbytes = sum(self._taken.pop(request, 0) for request in requests)
        if nbytes:
            self._reserved.give_back(nbytes)

    def _ask(self, request: int, wanted: Sequence[int]) -> bool:
        """Returns whether it was sent."""
        pages = self.pages

        def answer(message: Any) -> None:
            if "wanted" in message:
                codes = protocol.field(message, "wanted", bytes)
                if len(codes) != len(wanted):
                    raise WireError(f"the store wants {len(codes)} of {len(wanted)} pages")
                self._answered(request, codes)
            else:
                self._requests.forget(request)
                if message.get("usage") is not None:
                    self._note_usage(protocol.usage_from(message))
                self._kept(request, protocol.put_codes(message, len(wanted)))

        remaining = self.job.deadline.remaining()
        message = {
            "op": Op.PUT,
            "keys": b"".join(pages.keys[at] for at in wanted),
            "identities": [pages.identities[at] for at in wanted],
            "format": pages.series.format.to_plain(),
            "shard": pages.series.shard,
            "checksums": self._seal.checksums,
            "timeout": protocol.MAX_FOR_S if remaining is None else remaining,
        }
        return self._requests.listen(request, message, answer, self)

    def _answered(self, request: int, codes: Sequence[int]) -> None:
        """The store says for each page of a request: send it, or its result."""
        with self.lock:
            numbers = self._asked.get(request)
            if numbers is None or self.is_over:
                return
            send = []
            for at, code in zip(numbers, codes, strict=True):
                if code == protocol.SEND:
                    send.append(at)
                else:
                    self.results[at] = protocol.result_of(code)
            self._ready.append((request, send))
        if send:
            self._again(self)

    def _kept(self, request: int, codes: Sequence[int]) -> None:
        """The store has the pages of a request, or says why not."""
        with self.lock:
            numbers = self._asked.pop(request, None)
            if numbers is None or self.is_over:
                return
            for at, code in zip(numbers, codes, strict=True):
                self.results[at] = protocol.result_of(code)
        self._give_back([request])
        self.ask()

    # -- a step: gather and send ---------------------------------------------------------------

    def next_step(self) -> int | None:
        while self._ready:
            request, numbers = self._ready.popleft()
            if numbers and not self.is_over:
                step = next(self._numbers)
                self._steps[step] = (request, numbers)
                return step
        return None

    def has_steps(self) -> bool:
        return bool(self._ready) and not self.is_over

    def do(self, step: int) -> None:
        request, numbers = self._steps.pop(step)
        position = {at: index for index, at in enumerate(self._asked.get(request, ()))}
        pages, form = self.pages, self.pages.series.format
        with self.lock:
            if self._copy is None:
                self._copy = PageCopy(pages.memory, self._seal)
            copy = self._copy
        for row_bytes, run in self._rows(numbers):

            def fill(rows: memoryview, run: Sequence[int] = run, row_bytes: int = row_bytes) -> None:
                offsets = range(0, len(run) * row_bytes, row_bytes)
                checksums: list[bytes | None] = []
                with self.copying():
                    for part in runs_of(run):
                        done = len(checksums)
                        copy.use(part.start, PageRows(rows, offsets[done : done + len(part)], form.nbytes))
                        checksums += copy.save(part)
                beginnings = self._seal.beginnings(pages.series, [pages.identities[at] for at in run])
                for offset, beginning, made in zip(offsets, beginnings, checksums, strict=True):
                    end = offset + form.nbytes
                    rows[end : offset + row_bytes] = self._seal.complete(
                        beginning, form, rows[offset:end], made
                    )

            self._send(request, position.get(run[0], 0), len(run), row_bytes, fill)

    def _rows(self, numbers: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
        """Pages whose rows have one length, and that length."""
        form = self.pages.series.format

        def row_bytes(at: int) -> int:
            return form.nbytes + self._seal.header_length(form, self.pages.identities[at])

        for nbytes, run in itertools.groupby(numbers, key=row_bytes):
            yield nbytes, list(run)

    # -- the end -------------------------------------------------------------------------------

    def end(self, reason: MissReason | None) -> bool:
        with self.lock:
            asked = [] if self.is_over else list(self._asked)
        is_first = super().end(reason)
        for request in asked:
            self._requests.tell({"op": Op.CANCEL, "id": request})
        self._give_back(list(self._taken))
        return is_first
