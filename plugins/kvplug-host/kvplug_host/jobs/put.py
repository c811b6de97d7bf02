"""A put: pages come into slots, and become visible there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvplug.transport import Job, JobTask, MissReason, PageRequest, PutReason


class Put(JobTask):
    """Pages of one request. Those that are removed before they are put are not kept."""

    def __init__(
        self,
        job: Job[PutReason | None],
        pages: PageRequest,
        num_steps: int | None = None,
        settled: Callable[[Put], None] = lambda put: None,
    ) -> None:
        """
        Args:
            num_steps: as of :class:`JobTask`.
            settled: called once, when nothing is copied out of the pages' memory any more.
        """
        super().__init__(job, num_steps)
        self.pages = pages
        self._on_settled = settled
        self._forgotten: set[bytes] = set()
        self._all_forgotten = False

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Pages are removed, also those that were there before. ``None``: all."""
        with self.lock:
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
        return [
            PutReason.CANCELLED if result is None and self.is_forgotten(key) else result
            for key, result in zip(self.pages.keys, super().final(reason), strict=True)
        ]

    def result_for(self, reason: MissReason | None) -> PutReason | None:
        return None if reason is None else PutReason.of(reason)

    def settled(self) -> None:
        self._on_settled(self)
