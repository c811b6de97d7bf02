"""A put of this process: pages are gathered into slots, their headers behind them, then published."""

from __future__ import annotations

from kvplug.transport import Job, PageRequest, PageSeal, PutReason
from kvplug_host.jobs import PUT_STEP_BYTES, Put, ranges_of
from kvplug_host.pages.pages import Pages
from kvplug_host.pages.slot_buffers import SlotBuffers


class SlotPut(Put):
    """Some pages in each step. Pages that lie in slots of the store already are not copied."""

    is_put = True

    def __init__(self, job: Job[PutReason | None], pages: PageRequest, seal: PageSeal, store: Pages) -> None:
        self._ranges = ranges_of(job.count, pages.series.format.nbytes, PUT_STEP_BYTES)
        super().__init__(job, pages, seal, len(self._ranges))
        self._store = store

    def do(self, step: int) -> None:
        pages, store = self.pages, self._store
        form, memory = pages.series.format, pages.memory
        rest = self.seal.header_length(form, b"")
        header_bytes = {at: rest + len(pages.identities[at]) for at in self._ranges[step]}
        slots, results = store.reserve(
            self, {at: form.nbytes + nbytes for at, nbytes in header_bytes.items()}
        )
        try:
            offsets = {at: slot.offset for at, slot in slots.items()}
            own = memory.rows().offsets if isinstance(memory, SlotBuffers) else ()
            in_place = {at for at, offset in offsets.items() if own and own[at] == offset}
            self.gather(store.segments.view, offsets, in_place)
        except BaseException:
            store.give_back(slots.values())
            raise
        store.publish(self, slots, header_bytes, results)

    def settled(self) -> None:
        self._store.settled(self)
