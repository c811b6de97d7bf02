"""Merges the workers' reports after a step into one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvplug.engine import TransferStats, WorkerOutput


class Reports:
    """Merges the reports of the workers that share a model, as vLLM does.

    A request has finished sending or receiving when every worker has reported it, possibly in different
    steps. A block is invalid if any worker reports it.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._sending: Counter[str] = Counter()
        self._recving: Counter[str] = Counter()

    def merge(self, outputs: Sequence[WorkerOutput]) -> WorkerOutput:
        """Merge the workers' ``outputs`` of one step, one from each worker."""
        stats = TransferStats()
        for output in outputs:
            if output.stats is not None:
                stats.merge(output.stats)
        return WorkerOutput(
            finished_sending=self._complete(self._sending, (one.finished_sending for one in outputs)),
            finished_recving=self._complete(self._recving, (one.finished_recving for one in outputs)),
            invalid_block_ids=frozenset().union(*(one.invalid_block_ids for one in outputs)),
            worker_metadata=tuple(metadata for one in outputs for metadata in one.worker_metadata),
            stats=stats.snapshot() if any(one.stats for one in outputs) else None,
        )

    def _complete(self, named: Counter[str], reports: Iterable[frozenset[str]]) -> frozenset[str]:
        for report in reports:
            named.update(report)
        done = frozenset(name for name, times in named.items() if times >= self._num_workers)
        for name in done:
            del named[name]
        return done
