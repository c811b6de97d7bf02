"""The connector "memory" keeps the laws, and what is particular to it."""

from __future__ import annotations

from collections import Counter

import pytest

from kvplug_testing.contract.connector.schedules import QUICK
from kvplug_testing.memory.connector.suite import MemoryConnectorContract


@pytest.mark.full
class TestMemory(MemoryConnectorContract):
    @pytest.mark.parametrize(
        ("first", "given"),
        [(0, {}), (1000, {"background": True}), (2000, {"spoils": True}), (5000, None)],
        ids=["pair", "background", "failing", "both"],
    )
    def test_the_seeds_of_the_level_quick_do_all_that_engines_do(
        self, first: int, given: dict[str, bool] | None
    ) -> None:
        counts: Counter[str] = Counter()
        for seed in QUICK:
            with self.scope():
                if given is None:
                    done = self._run_both(first + seed, spoils=True)
                else:
                    done = self._run_pair(first + seed, **given)
            self._host = ""
            counts += done.counts
        wanted = {"preempted", "aborted", "chunked", "ahead"} | ({"async"} if first == 1000 else set())
        assert wanted <= counts.keys(), f"never: {', '.join(sorted(wanted - counts.keys()))}"
