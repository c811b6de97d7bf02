"""The jobs of the store, in either process: requests in steps, pages that come in, pages that are put."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvplug.transport import (
    GetJob,
    Job,
    JobTask,
    MissReason,
    PageCopy,
    PageRequest,
    PageRows,
    PageSeal,
    PutReason,
)

STEP_BYTES: Final = 2 << 20
"""Bytes that one step copies, before it is another task's turn. They fit into the cache of a core or two."""

PUT_STEP_BYTES: Final = 2 * STEP_BYTES
"""The same for puts, which also reserve, make headers and publish in each step."""

WRONG: Final = frozenset({MissReason.FORMAT, MissReason.IDENTITY, MissReason.CORRUPT})
"""Why a page under the right key is wrong: it makes room for a right one."""


def ranges_of(count: int, nbytes: int, step_bytes: int = STEP_BYTES) -> list[range]:
    """Cut ``count`` pages or layers of ``nbytes`` each into ranges of about ``step_bytes``."""
    each = max(1, step_bytes // max(1, nbytes))
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


def runs_of(numbers: Sequence[int]) -> Iterator[range]:
    """Yield ascending numbers as ranges of consecutive ones."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begin], numbers[at - 1] + 1)
            begin = at


class Put(JobTask):
    """The put of one request. Pages that are removed before they are put are not kept."""

    def __init__(
        self,
        job: Job[PutReason | None],
        pages: PageRequest,
        seal: PageSeal,
        num_steps: int | None = None,
    ) -> None:
        """``num_steps``: as of :class:`JobTask`."""
        super().__init__(job, num_steps)
        self.pages = pages
        self.seal = seal
        self._copy: PageCopy | None = None
        self._forgotten: set[bytes] = set()
        self._all_forgotten = False

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Keep none of these pages, which a program removes; ``None``: none at all."""
        with self.lock:
            if keys is None:
                self._all_forgotten = True
            else:
                self._forgotten.update(keys)

    def is_forgotten(self, key: bytes) -> bool:
        """Whether the page was removed meanwhile."""
        return self._all_forgotten or key in self._forgotten

    def note_all(self, results: Sequence[tuple[int, PutReason | None]]) -> None:
        """Record the results of some pages."""
        with self.lock:
            for index, result in results:
                self.note(index, result)

    def gather(self, buffer: memoryview, offsets: Mapping[int, int], in_place: Container[int] = ()) -> None:
        """Copy pages into a buffer, each with its header behind it.

        Args:
            offsets: where each page begins, by its number.
            in_place: pages that are there already.

        Raises:
            JobTask.OverError, CopyError, MemoryError: as :meth:`copying`.
        """
        pages, seal, form = self.pages, self.seal, self.pages.series.format
        checksums: dict[int, bytes | None] = {}
        with self.copying():
            with self.lock:
                copy = self._copy = self._copy or PageCopy(pages.memory, seal)
            to_copy = [at for at in offsets if at not in in_place]
            to_hash = [at for at in offsets if at in in_place]
            for move, which in ((copy.save, to_copy), (copy.hash, to_hash)):
                for run in runs_of(which):
                    copy.use(run.start, PageRows(buffer, [offsets[at] for at in run], form.nbytes))
                    checksums |= zip(run, move(run), strict=True)
            beginnings = seal.beginnings(pages.series, [pages.identities[at] for at in offsets])
            for (at, offset), beginning in zip(offsets.items(), beginnings, strict=True):
                end = offset + form.nbytes
                header = seal.complete(beginning, form, buffer[offset:end], checksums[at])
                buffer[end : end + len(header)] = header

    def final(self, reason: MissReason | None) -> list[Any]:
        return [
            PutReason.CANCELLED if result is None and self.is_forgotten(key) else result
            for key, result in zip(self.pages.keys, super().final(reason), strict=True)
        ]

    def result_for(self, reason: MissReason | None) -> PutReason | None:
        return None if reason is None else PutReason.of(reason)


class Landing(JobTask):
    """The get of one request: its results, and the layers that may be used. Subclasses bring the pages.

    A layer is released when it is verified for all pages. Once a page is missed no more layers are released;
    the results name the page.
    """

    job: GetJob

    def __init__(self, job: GetJob, pages: PageRequest, seal: PageSeal) -> None:
        super().__init__(job, None)
        self.pages = pages
        self.seal = seal
        form = pages.series.format
        self.headers: list[bytes] = [b""] * job.count
        self.layers = ranges_of(form.num_layers, form.layer_nbytes * job.count)
        """Layers that are copied together. If one step cannot copy all pages, several steps copy a layer."""
        widest = max(map(len, self.layers), default=1) * form.layer_nbytes
        self.ranges = ranges_of(job.count, widest)
        self._left = [len(self.ranges)] * len(self.layers)
        self._is_missing = False
        self._complete = 0

    @abc.abstractmethod
    def discard(self, index: int, reason: MissReason) -> None:
        """Have a page removed, which is wrong for that reason."""

    def miss(self, index: int, reason: MissReason) -> None:
        """Note that a page is missed. The first reason counts."""
        with self.lock:
            if self.results[index] is not JobTask.UNKNOWN or self.is_over:
                return
            self.results[index] = reason
            self._is_missing = True
        if reason in WRONG:
            self.discard(index, reason)

    def check_headers(self, numbers: Sequence[int], headers: Sequence[bytes]) -> None:
        """Check the headers of these pages. Notes those that are wrong as missed."""
        pages = self.pages
        identities = [pages.identities[at] for at in numbers]
        reasons = self.seal.check_headers(pages.series, identities, headers)
        for index, header, reason in zip(numbers, headers, reasons, strict=True):
            if reason is None:
                self.headers[index] = header
            else:
                self.miss(index, reason)

    def land(self, pages: range, load: Callable[[range], list[MissReason | None] | None]) -> None:
        """Verify some layers of these pages and copy them to the caller, except for pages that are missed.

        Args:
            load: ``load(run)``: does so for consecutive pages, as :meth:`PageCopy.load`.

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
        """Yield the pages that are not missed, as ranges of consecutive ones."""
        if not self._is_missing:
            yield pages
            return
        yield from runs_of([index for index in pages if self.results[index] is JobTask.UNKNOWN])

    def landed(self, group: int) -> None:
        """Note that one of :attr:`ranges` is verified for a group of layers. Releases layers that are
        complete."""
        with self.lock:
            self._left[group] -= 1
            while self._complete < len(self.layers) and not self._left[self._complete]:
                self._complete += 1
            if self.is_over:
                return
            ready = 0 if self._is_missing or not self._complete else self.layers[self._complete - 1].stop
        self.job.advance(ready)


class SlotGet(Landing):
    """A get out of slots that this process can read: its own, or those of a store in another process.

    Its steps run once :meth:`found` was called. The first step checks the headers, the others copy.
    """

    def __init__(
        self, job: GetJob, pages: PageRequest, seal: PageSeal, again: Callable[[SlotGet], object]
    ) -> None:
        """``again``: queues this task once more."""
        super().__init__(job, pages, seal)
        self._again = again
        self._num_steps = 1
        self._copy: PageCopy | None = None
        """Once the headers are checked."""
        self._buffer = memoryview(b"")
        self._slots: Sequence[Any] = ()
        self._generations: PageCopy.Generations | None = None

    def found(
        self,
        buffer: memoryview,
        slots: Sequence[Any],
        generations: PageCopy.Generations | None = None,
    ) -> None:
        """Set where the pages are.

        Args:
            buffer: has all slots.
            slots: for each page its slot, with ``offset``, ``payload_bytes`` and ``header_bytes``; ``None``:
                the page is absent.
            generations: those of all slots, to be compared after each copy; ``None``: the pages are pinned.
        """
        self._buffer, self._slots, self._generations = buffer, slots, generations
        for index, slot in enumerate(slots):
            if slot is None:
                self.miss(index, MissReason.ABSENT)

    def do(self, step: int) -> None:
        if self._copy is None:
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
            for slot in (self._slots[index] for index in left):
                begin = slot.offset + slot.payload_bytes
                headers.append(bytes(self._buffer[begin : begin + slot.header_bytes]))
        if self._generations is not None:
            there = self._generations.are_there(left)
            for index, is_there in zip(left, there, strict=True):
                if not is_there:
                    self.miss(index, MissReason.EVICTED)
            headers = list(itertools.compress(headers, there))
            left = list(itertools.compress(left, there))
        self.check_headers(left, headers)
        for index in left:
            if self._slots[index].payload_bytes != wanted:
                self.miss(index, MissReason.CORRUPT)

    def _new_copy(self) -> PageCopy:
        form = self.pages.series.format
        is_left = [each is JobTask.UNKNOWN for each in self.results]
        copy = PageCopy(self.pages.memory, self.seal, generations=self._generations)
        if any(is_left):
            offsets = [slot.offset if left else 0 for slot, left in zip(self._slots, is_left, strict=True)]
            copy.use(0, PageRows(self._buffer, offsets, form.nbytes), self.headers)
        return copy
