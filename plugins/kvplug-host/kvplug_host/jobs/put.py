"""A put: pages come into slots, and become visible there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvplug.transport import Job, JobTask, MissReason, PageRequest, PutReason
from kvplug_host.jobs.steps import PUT_STEP_BYTES, page_ranges, put_results


class Put(JobTask):
    """Pages of one request, some in each step; none, where they come over a pipe."""

    def __init__(
        self,
        job: Job[PutReason | None],
        pages: PageRequest,
        settled: Callable[[Put], None],
    ) -> None:
        self.ranges = page_ranges(job.count, pages.series.format.nbytes, PUT_STEP_BYTES)
        super().__init__(job, len(self.ranges))
        self.pages = pages
        self._on_settled = settled
        self._forgotten: set[bytes] = set()
        self._all_forgotten = False

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Pages are removed before they were put: they are not kept. ``None``: all."""
        if keys is None:
            self._all_forgotten = True
        else:
            self._forgotten.update(keys)

    def is_forgotten(self, key: bytes) -> bool:
        """Whether the page was removed meanwhile."""
        return self._all_forgotten or key in self._forgotten

    def note_all(self, results: Sequence[tuple[int, PutReason | None]]) -> None:
        """The results of some pages."""
        with self.lock:
            for index, result in results:
                self.note(index, result)

    def final(self, reason: MissReason | None) -> list[Any]:
        return put_results(self.results, reason, list(map(self.is_forgotten, self.pages.keys)))

    def settled(self) -> None:
        self._on_settled(self)
