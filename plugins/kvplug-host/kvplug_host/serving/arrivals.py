"""Pages on their way from a process that puts them: whole pages over the pipe, straight into slots, or out of
memory that the process lends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvplug import UnsupportedError
from kvplug.transport import (
    Deadline,
    Job,
    PageBuffers,
    PageCopy,
    PageMemory,
    PageRequest,
    PageRows,
    PageSeal,
    Pipe,
    PutReason,
    WireError,
)
from kvplug_host import protocol
from kvplug_host.arena.slots import Slot
from kvplug_host.jobs import Put
from kvplug_host.pages.pages import Pages


class PipedPages(PageMemory):
    """The memory of a put whose pages come over the pipe, straight into slots: nothing copies it."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def places(self) -> NoReturn:
        raise UnsupportedError("these pages come over a pipe")


class Arrival(Put):
    """One put of a peer: slots for the pages that are to be sent."""

    def __init__(
        self,
        store: Pages,
        seal: PageSeal,
        pages: PageRequest,
        deadline: Deadline,
        done: Callable[[list[PutReason | None]], None],
    ) -> None:
        """
        Args:
            seal: how the peer protects its pages.
            done: called once, with the results.
        """
        super().__init__(Job(len(pages.keys), deadline), pages, seal)
        self.job.add_done_callback(lambda ended: done(ended.results() or []))
        self._store = store
        self._header_bytes = {
            at: seal.header_length(pages.series.format, identity)
            for at, identity in enumerate(pages.identities)
        }
        self._slots: dict[int, Slot] = {}
        """Of the pages that are still to come."""
        self._left = 0
        """Pages that have no result yet."""
        self._page_bytes = pages.series.format.nbytes + max(self._header_bytes.values())
        self.begun_at = time.monotonic()

    @property
    def bytes_to_come(self) -> int:
        """Of the pages that are to be sent, and have not come."""
        return 0 if self.is_over else self._left * self._page_bytes

    def begin(self, reserved_bytes: int) -> bytes:
        """For each page: send it, or its result.

        Args:
            reserved_bytes: what the peer has still to send of other puts.

        Raises:
            JobOverError: the store is closed.
        """
        store, nbytes = self._store, self.pages.series.format.nbytes
        store.jobs.begin(self)
        most = protocol.most_reserved(store.segments.total_bytes)
        slots, results = store.reserve(
            self,
            {at: nbytes + header_bytes for at, header_bytes in self._header_bytes.items()},
            most - reserved_bytes if reserved_bytes else max(most, self._page_bytes),
        )
        self.note_all(results)
        codes = bytearray([protocol.SEND] * len(self.pages.keys))
        for at, result in results:
            codes[at] = protocol.PUT_RESULTS.index(result)
        with self.lock:
            is_over = self.is_over
            if not is_over:
                self._slots, self._left = slots, len(slots)
        if is_over:
            store.give_back(slots.values())
        return bytes(codes)

    def resolved(self, count: int) -> None:
        """So many pages more have their result. The put ends with the last of them."""
        with self.lock:
            self._left -= count
            is_finished = not self._left
        if is_finished:
            self.end(None)

    def receive(self, pipe: Pipe, first: int, count: int, timeout: float) -> bool:
        """Receive the next ``count`` pages from page ``first`` on that are to be sent, and publish them.

        Returns whether they were received: if the put has ended, they are still to come.

        Raises:
            WireError: what comes was not agreed on.
            KvplugError: the pages do not come in time, or the pipe cannot be used any more.
        """

        def come(rows: PageRows) -> PageRows:
            pipe.recv_blocks(rows.views([0], rows.nbytes), rows.offsets, timeout=timeout)
            return rows

        return self._take(first, count, come)

    def copy(self, lent: memoryview, first: int, count: int) -> bool:
        """The same for pages that are in ``lent``, one after the other."""

        def come(rows: PageRows) -> PageRows:
            if count * rows.nbytes > len(lent):
                raise WireError(f"it lends {len(lent)} bytes for {count} pages of {rows.nbytes}")
            return PageRows.dense(lent, count, rows.nbytes)

        return self._take(first, count, come)

    def _take(self, first: int, count: int, come: Callable[[PageRows], PageRows]) -> bool:
        """``come(rows)``: have the pages come, and return where they are: in these rows, which are their
        slots, or in others."""
        store, nbytes = self._store, self.pages.series.format.nbytes
        with self.lock:
            if self.is_over:
                return False
            numbers = [at for at in self._slots if at >= first][:count]
            header_bytes = {self._header_bytes[at] for at in numbers}
            if len(numbers) != count or len(header_bytes) != 1:
                raise WireError(f"it sends {count} pages, which were not agreed on")
            slots = {at: self._slots.pop(at) for at in numbers}
        try:
            rows = PageRows(
                store.segments.view, [slot.offset for slot in slots.values()], nbytes + header_bytes.pop()
            )
            wrong = self._wrong(numbers, rows, come(rows))
        except BaseException:
            store.give_back(slots.values())
            raise
        store.give_back([slots.pop(at) for at in wrong])
        store.publish(self, slots, self._header_bytes, [(at, PutReason.OTHER) for at in wrong])
        self.resolved(count)
        return True

    def _wrong(self, numbers: Sequence[int], rows: PageRows, come: PageRows) -> set[int]:
        """The pages that are not what the put has announced. The others are in their rows at the end.

        ``come``: where the pages are; may be the same rows.
        """
        pages, seal, form = self.pages, self.seal, self.pages.series.format
        headers = [bytes(come.row(index)[form.nbytes :]) for index in range(len(come))]
        reasons = seal.check_headers(pages.series, [pages.identities[at] for at in numbers], headers)
        left = [index for index, reason in enumerate(reasons) if reason is None]
        memory, source = (
            PageRows(each.buffer, [each.offsets[index] for index in left], form.nbytes)
            for each in (rows, come)
        )
        copy = PageCopy(PageBuffers(form, memory), seal)
        copy.use(0, source, [headers[index] for index in left])
        every = range(len(left))
        if come is rows:
            checks = copy.verify(every)
        else:
            checks = copy.load(every) or [None] * len(left)
            for index in left:
                rows.row(index)[form.nbytes :] = headers[index]
        right = {numbers[index] for index, reason in zip(left, checks, strict=True) if reason is None}
        return {*numbers} - right

    def settled(self) -> None:
        with self.lock:
            slots, self._slots = self._slots, {}
        self._store.give_back(slots.values())
