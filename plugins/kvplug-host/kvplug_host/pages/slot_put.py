"""A put of this process: pages are gathered into slots, their headers behind them, then published."""

from __future__ import annotations

from kvplug.transport import Job, PageCopy, PageRequest, PageRows, PageSeal, PutReason
from kvplug_host.jobs import PUT_STEP_BYTES, Put, ranges_of, runs_of
from kvplug_host.pages.pages import Pages
from kvplug_host.pages.slot_buffers import SlotBuffers


class SlotPut(Put):
    """Some pages in each step. Pages that lie in slots of the store already are not copied."""

    is_put = True

    def __init__(self, job: Job[PutReason | None], pages: PageRequest, seal: PageSeal, store: Pages) -> None:
        self._ranges = ranges_of(job.count, pages.series.format.nbytes, PUT_STEP_BYTES)
        super().__init__(job, pages, len(self._ranges), store.settled)
        self._seal = seal
        self._store = store
        self._prepared: tuple[PageCopy, list[bytes], int] | None = None

    def _prepare(self) -> tuple[PageCopy, list[bytes], int]:
        """What is the same for all steps: the copies, the beginning of each page's header, and how many bytes
        each header has after it."""
        with self.lock:
            if self._prepared is None:
                pages, seal = self.pages, self._seal
                beginnings = seal.beginnings(pages.series, pages.identities)
                first = pages.identities[0]
                rest = seal.header_length(pages.series.format, first) - len(beginnings[0])
                self._prepared = PageCopy(pages.memory, seal), beginnings, rest
            return self._prepared

    def do(self, step: int) -> None:
        numbers, pages, seal, store = self._ranges[step], self.pages, self._seal, self._store
        form, memory, view = pages.series.format, pages.memory, store.segments.view
        copy, beginnings, rest = self._prepare()
        header_bytes = {at: len(beginnings[at]) + rest for at in numbers}
        slots, results = store.reserve(
            self, {at: form.nbytes + nbytes for at, nbytes in header_bytes.items()}
        )
        try:
            with self.copying():
                to_copy, in_place = list(slots), []
                if isinstance(memory, SlotBuffers):
                    own = memory.rows().offsets
                    in_place = [at for at in to_copy if own[at] == slots[at].offset]
                    to_copy = [at for at in to_copy if own[at] != slots[at].offset]
                checksums: dict[int, bytes | None] = {}
                for move, which in ((copy.save, to_copy), (copy.hash, in_place)):
                    for run in runs_of(which):
                        copy.use(run.start, PageRows(view, [slots[at].offset for at in run], form.nbytes))
                        checksums |= zip(run, move(run), strict=True)
                for at, slot in slots.items():
                    end = slot.offset + form.nbytes
                    header = seal.complete(beginnings[at], form, view[slot.offset : end], checksums[at])
                    view[end : end + len(header)] = header
        except BaseException:
            store.give_back(slots.values())
            raise
        store.publish(self, slots, header_bytes, results)
