"""A request for pages: layer after layer, over all of its pages, verified before anything is released."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvplug.transport import GetJob, JobTask, MissReason, PageCopy, PageRequest, PageRows, PageSeal
from kvplug_host.jobs.steps import ranges_of

WRONG: Final = frozenset({MissReason.FORMAT, MissReason.IDENTITY, MissReason.CORRUPT})
"""Why a page under the right key is wrong: it makes room for a right one."""


class Landing(JobTask):
    """Where the pages of one request come in, from wherever: the results, and the layers that may be used.

    A layer is released when it is verified for all pages. As soon as a page is missed no more layers are: the
    caller learns with the results which one it is.
    """

    job: GetJob

    def __init__(
        self,
        job: GetJob,
        pages: PageRequest,
        seal: PageSeal,
        discard: Callable[[int, MissReason], None],
    ) -> None:
        """
        Args:
            discard: called with the number of a page that is wrong, and why.
        """
        super().__init__(job, None)
        self.pages = pages
        self.seal = seal
        self._discard = discard
        form = pages.series.format
        self.headers: list[bytes] = [b""] * job.count
        self.layers = ranges_of(form.num_layers, form.layer_nbytes * job.count)
        """The layers that come together. Where all pages have no room in one step, the pages of a layer come
        in several."""
        widest = max(map(len, self.layers), default=1) * form.layer_nbytes
        self.ranges = ranges_of(job.count, widest)
        self._left = [len(self.ranges)] * len(self.layers)
        self._is_missing = False
        self._complete = 0

    def miss(self, index: int, reason: MissReason) -> None:
        """A page is missed. The first reason counts."""
        with self.lock:
            if self.results[index] is not JobTask.UNKNOWN or self.is_over:
                return
            self.results[index] = reason
            self._is_missing = True
        if reason in WRONG:
            self._discard(index, reason)

    def check_headers(self, numbers: Sequence[int], headers: Sequence[bytes]) -> None:
        """The headers of these pages have come."""
        pages = self.pages
        identities = [pages.identities[at] for at in numbers]
        reasons = self.seal.check_headers(pages.series, identities, headers)
        for index, header, reason in zip(numbers, headers, reasons, strict=True):
            if reason is None:
                self.headers[index] = header
            else:
                self.miss(index, reason)

    def land(self, pages: range, load: Callable[[range], list[MissReason | None] | None]) -> None:
        """Verify some layers of these pages, as far as they are not missed, and copy them to the caller.

        Args:
            load: ``load(run)``: does so for some of the pages, as :meth:`PageCopy.load` does.

        Raises:
            JobOverError: the job has ended.
        """
        for run in self._runs(pages):
            with self.copying():
                reasons = load(run)
            for index, reason in zip(run, reasons or (), strict=reasons is not None):
                if reason is not None:
                    self.miss(index, reason)

    def _runs(self, pages: range) -> Iterator[range]:
        """Consecutive pages that are not missed."""
        if not self._is_missing:
            yield pages
            return
        begin = pages.start
        for index in pages:
            if self.results[index] is not JobTask.UNKNOWN:
                if index > begin:
                    yield range(begin, index)
                begin = index + 1
        if pages.stop > begin:
            yield range(begin, pages.stop)

    def landed(self, group: int) -> None:
        """Some of the pages of a group of layers have come, and were verified."""
        with self.lock:
            self._left[group] -= 1
            while self._complete < len(self.layers) and not self._left[self._complete]:
                self._complete += 1
            if self.is_over:
                return
            ready = 0 if self._is_missing or not self._complete else self.layers[self._complete - 1].stop
        self.job.advance(ready)


class SlotGet(Landing):
    """Out of slots that this process can read: its own, or those of a store in another process.

    Once :meth:`found` was called its steps are run. The first step checks the headers, the others
    copy.
    """

    def __init__(
        self,
        job: GetJob,
        pages: PageRequest,
        seal: PageSeal,
        *,
        discard: Callable[[int, MissReason], None],
        settled: Callable[[], None],
        again: Callable[[SlotGet], object],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            discard: as for :class:`Landing`.
            settled: called once, when no slot is read any more.
            again: has the steps of this task run once more.
            prepare: called in the first step. May raise what the caller of :meth:`end` should know.
        """
        super().__init__(job, pages, seal, discard)
        self._on_settled = settled
        self._again = again
        self._prepare = prepare
        self._num_steps = 1
        self._copy: PageCopy | None = None
        """Once the headers are checked."""
        self._buffer = memoryview(b"")
        self._offsets: Sequence[int] = ()
        self._header_bytes: Sequence[int] = ()
        self._payload_bytes: Sequence[int] = ()
        self._generations: PageCopy.Generations | None = None

    def found(
        self,
        buffer: memoryview,
        offsets: Sequence[int],
        header_bytes: Sequence[int],
        payload_bytes: Sequence[int],
        generations: PageCopy.Generations | None = None,
    ) -> None:
        """Where the pages are.

        Args:
            buffer: has all slots.
            offsets: of each page's slot: its bytes, then the header. Of a page that is missed: any.
            generations: those of all slots; ``None``: the pages stay there.
        """
        self._buffer = buffer
        self._offsets = offsets
        self._header_bytes = header_bytes
        self._payload_bytes = payload_bytes
        self._generations = generations

    def do(self, step: int) -> None:
        if self._copy is None:
            self._prepare()
            self._check_headers()
            self._copy = self._new_copy()
            if any(each is JobTask.UNKNOWN for each in self.results):
                self._num_steps = 1 + len(self.layers) * len(self.ranges)
                self._again(self)
            return
        copy = self._copy
        group, number = divmod(step - 1, len(self.ranges))
        self.land(self.ranges[number], lambda run: copy.load(run, self.layers[group]))
        self.landed(group)

    def _check_headers(self) -> None:
        wanted = self.pages.series.format.nbytes
        left = [index for index, each in enumerate(self.results) if each is JobTask.UNKNOWN]
        headers = []
        with self.copying():  # the slots are not used again meanwhile
            for index in left:
                begin = self._offsets[index] + self._payload_bytes[index]
                headers.append(bytes(self._buffer[begin : begin + self._header_bytes[index]]))
        if self._generations is not None:
            there = self._generations.are_there(left)
            for index, is_there in zip(left, there, strict=True):
                if not is_there:
                    self.miss(index, MissReason.EVICTED)
            headers = list(itertools.compress(headers, there))
            left = list(itertools.compress(left, there))
        self.check_headers(left, headers)
        for index in left:
            if self._payload_bytes[index] != wanted:
                self.miss(index, MissReason.CORRUPT)

    def _new_copy(self) -> PageCopy:
        form = self.pages.series.format
        is_left = [each is JobTask.UNKNOWN for each in self.results]
        copy = PageCopy(self.pages.memory, self.seal, generations=self._generations)
        if any(is_left):
            offsets = [offset if left else 0 for offset, left in zip(self._offsets, is_left, strict=True)]
            copy.use(0, PageRows(self._buffer, offsets, form.nbytes), self.headers)
        return copy

    def settled(self) -> None:
        self._on_settled()
