"""A request for pages: layer after layer, over all of its pages, verified before anything is released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvplug.transport import GetJob, MissReason, PageRequest, PageRows, PageSeal
from kvplug_host import copying
from kvplug_host.jobs.steps import UNKNOWN, Steps, layer_ranges, page_ranges

WRONG: Final = frozenset({MissReason.FORMAT, MissReason.IDENTITY, MissReason.CORRUPT})
"""Why a page under the right key is wrong: it makes room for a right one."""


class Landing(Steps):
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
        """``discard``: called with the number of a page that is wrong, and why."""
        super().__init__(job, None)
        self.pages = pages
        self.seal = seal
        self._discard = discard
        form = pages.series.format
        self.headers: list[bytes] = [b""] * job.count
        self.layers = layer_ranges(form.num_layers, form.layer_nbytes * job.count)
        """The layers that come together. Where all pages have no room in one step, the pages of a layer come
        in several."""
        widest = max(map(len, self.layers), default=1) * form.layer_nbytes
        self.ranges = page_ranges(job.count, widest)
        self._left = [len(self.ranges)] * len(self.layers)
        self._is_missing = False
        self._complete = 0

    def miss(self, index: int, reason: MissReason) -> None:
        """A page is missed. The first reason counts."""
        with self.lock:
            if self.results[index] is not UNKNOWN or self.is_over:
                return
            self.results[index] = reason
            self._is_missing = True
        if reason in WRONG:
            self._discard(index, reason)

    def check_header(self, index: int, header: bytes) -> None:
        """The header of a page has come."""
        pages = self.pages
        reason = self.seal.check_header(pages.series, pages.identities[index], header)
        if reason is None:
            self.headers[index] = header
        else:
            self.miss(index, reason)

    def land(
        self,
        layers: range,
        pages: range,
        rows: Callable[[Sequence[int]], PageRows],
        is_valid: Callable[[Sequence[int]], Sequence[bool]],
    ) -> None:
        """Verify these layers of these pages, as far as they are not missed, and copy them to the caller.

        Args:
            rows: the bytes of the layers of pages with these numbers.
            is_valid: asked after the copy: whether the bytes were those of the page all the time.

        Raises:
            OverError: the job has ended.
        """
        form = self.pages.series.format
        for run in self._runs(pages):
            with self.copying():
                checks = copying.load(
                    self.seal,
                    form,
                    [self.headers[index] for index in run],
                    rows(run),
                    self.pages.memory,
                    run[0],
                    layers,
                )
            for index, valid, check in zip(run, is_valid(run), checks, strict=True):
                if not valid:
                    self.miss(index, MissReason.EVICTED)
                elif check is not None:
                    self.miss(index, check)

    def _runs(self, pages: range) -> Iterator[range]:
        """Consecutive pages that are not missed."""
        begin = pages.start
        for index in pages:
            if self.results[index] is not UNKNOWN:
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

    def final(self, reason: MissReason | None) -> list[MissReason | None]:
        return [reason if each is UNKNOWN else each for each in self.results]

    def do(self, step: int) -> None:
        """A step in a worker: none, where the pages come over a pipe."""


class SlotGet(Landing):
    """Out of slots that this process can read: its own, or those of a store in another process.

    Once :meth:`found` was called it is put to the workers. The first step checks the headers, the others
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
            again: puts this task to the workers once more.
            prepare: called in the first step. May raise what the caller of :meth:`end` should know.
        """
        super().__init__(job, pages, seal, discard)
        self._on_settled = settled
        self._again = again
        self._prepare = prepare
        self._num_steps = 1
        self._is_checked = False
        self._buffer = memoryview(b"")
        self._offsets: Sequence[int] = ()
        self._header_bytes: Sequence[int] = ()
        self._payload_bytes: Sequence[int] = ()
        self._is_valid: Callable[[Sequence[int]], Sequence[bool]] = _all_valid

    def found(
        self,
        buffer: memoryview,
        offsets: Sequence[int],
        header_bytes: Sequence[int],
        payload_bytes: Sequence[int],
        is_valid: Callable[[Sequence[int]], Sequence[bool]] | None = None,
    ) -> None:
        """Where the pages are.

        Args:
            buffer: has all slots.
            offsets: of each page's slot: its bytes, then the header. Of a page that is missed: any.
            is_valid: whether each of these pages was in its slot until now; default: they stay there.
        """
        self._buffer = buffer
        self._offsets = offsets
        self._header_bytes = header_bytes
        self._payload_bytes = payload_bytes
        self._is_valid = is_valid or _all_valid

    def do(self, step: int) -> None:
        if not self._is_checked:
            self._prepare()
            self._check_headers()
            self._is_checked = True
            if any(each is UNKNOWN for each in self.results):
                self._num_steps = 1 + len(self.layers) * len(self.ranges)
                self._again(self)
            return
        group, number = divmod(step - 1, len(self.ranges))
        self.land(self.layers[group], self.ranges[number], self._rows_of(self.layers[group]), self._is_valid)
        self.landed(group)

    def _check_headers(self) -> None:
        wanted = self.pages.series.format.nbytes
        left = [index for index, each in enumerate(self.results) if each is UNKNOWN]
        headers = []
        with self.copying():  # the slots are not used again meanwhile
            for index in left:
                begin = self._offsets[index] + self._payload_bytes[index]
                headers.append(bytes(self._buffer[begin : begin + self._header_bytes[index]]))
        for index, header, valid in zip(left, headers, self._is_valid(left), strict=True):
            if not valid:
                self.miss(index, MissReason.EVICTED)
                continue
            self.check_header(index, header)
            if self._payload_bytes[index] != wanted:
                self.miss(index, MissReason.CORRUPT)

    def _rows_of(self, layers: range) -> Callable[[Sequence[int]], PageRows]:
        step = self.pages.series.format.layer_nbytes

        def rows(run: Sequence[int]) -> PageRows:
            offsets = [self._offsets[index] + layers.start * step for index in run]
            return PageRows(self._buffer, offsets, len(layers) * step)

        return rows

    def _settled(self) -> None:
        self._on_settled()


def _all_valid(numbers: Sequence[int]) -> list[bool]:
    return [True] * len(numbers)
