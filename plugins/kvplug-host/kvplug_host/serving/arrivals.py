"""Pages on their way from a process that puts them: over the pipe, or in memory that the process lends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from kvplug import UnsupportedError
from kvplug.transport import (
    Deadline,
    Job,
    JobTask,
    PageBuffers,
    PageCopy,
    PageMemory,
    PageRequest,
    PageRows,
    PageSeal,
    PutReason,
    WireError,
)
from kvplug_host import protocol
from kvplug_host.jobs import PUT_STEP_BYTES, Put
from kvplug_host.pages.pages import Pages


class PipedPages(PageMemory):
    """Stands for the memory of a put whose pages are in another process."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def places(self) -> NoReturn:
        raise UnsupportedError("these pages are in another process")


class Arrival(Put):
    """One put of a peer. Slots are taken for pages that have come, so a peer that sends none holds none."""

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
        form = pages.series.format
        self._row_bytes = [form.nbytes + seal.header_length(form, each) for each in pages.identities]
        """Of each page and its header."""
        self._to_come: dict[int, None] = {}
        """The numbers of the pages that are to be sent, and have not come."""
        self._left = 0
        """Pages that have no result yet."""

    def begin(self) -> bytes | None:
        """For each page: send it, or its result. ``None``: the put has ended, since the store is closed."""
        if not self._store.jobs.begin(self):
            return None
        results = self._store.known_results(self, self._row_bytes)
        self.note_all(results)
        codes = bytearray([protocol.SEND] * len(self.pages.keys))
        for at, result in results:
            codes[at] = protocol.PUT_RESULTS.index(result)
        with self.lock:
            self._to_come = dict.fromkeys(at for at, code in enumerate(codes) if code == protocol.SEND)
            self._left = len(self._to_come)
        return bytes(codes)

    def resolved(self, count: int) -> None:
        """So many pages more have their result. The put ends with the last of them."""
        with self.lock:
            self._left -= count
            is_finished = not self._left
        if is_finished:
            self.end(None)

    def next_pages(self, first: int, count: int) -> tuple[list[int], int] | None:
        """The numbers of the next ``count`` pages from page ``first`` on that are to be sent, which come now,
        and the bytes of each with its header; ``None``: the put has ended.

        Raises:
            WireError: these pages were not agreed on.
        """
        most = max(1, PUT_STEP_BYTES // max(1, self.pages.series.format.nbytes))
        with self.lock:
            if self.is_over:
                return None
            numbers = [at for at in self._to_come if at >= first][:count]
            lengths = {self._row_bytes[at] for at in numbers}
            if len(numbers) != count or len(lengths) != 1 or count > most:
                raise WireError(f"it sends {count} pages, which were not agreed on")
            for at in numbers:
                del self._to_come[at]
        return numbers, lengths.pop()

    def keep(self, numbers: Sequence[int], rows: PageRows) -> None:
        """Copy these pages, which have come, into slots, if they are right, and publish them. ``rows``: each
        with its header. Their bytes may change meanwhile: the peer may have lent them."""
        pages, seal, form, store = self.pages, self.seal, self.pages.series.format, self._store
        headers = {at: bytes(rows.row(row)[form.nbytes :]) for row, at in enumerate(numbers)}
        identities = [pages.identities[at] for at in numbers]
        reasons = seal.check_headers(pages.series, identities, [*headers.values()])
        right = [at for at, reason in zip(numbers, reasons, strict=True) if reason is None]
        try:
            slots, results = store.reserve(self, dict.fromkeys(right, rows.nbytes))
        except JobTask.OverError:
            return
        try:
            view, begins = store.segments.view, dict(zip(numbers, rows.offsets, strict=True))
            into = PageRows(view, [slot.offset for slot in slots.values()], form.nbytes)
            source = PageRows(rows.buffer, [begins[at] for at in slots], form.nbytes)
            copy = PageCopy(PageBuffers(form, into), seal)
            copy.use(0, source, [headers[at] for at in slots])
            faults = copy.load(range(len(slots))) or [None] * len(slots)
            for at, slot in slots.items():
                end = slot.offset + form.nbytes
                view[end : end + len(headers[at])] = headers[at]
        except BaseException:
            store.give_back(slots.values())
            raise
        wrong = {*numbers}.difference(right)
        wrong.update(at for at, fault in zip(slots, faults, strict=True) if fault is not None)
        store.give_back([slots.pop(at) for at in wrong if at in slots])
        header_bytes = {at: len(header) for at, header in headers.items()}
        store.publish(self, slots, header_bytes, [*results, *((at, PutReason.OTHER) for at in wrong)])
        self.resolved(len(numbers))
