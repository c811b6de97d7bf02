"""The alarm about slow stores: what a store gives and takes, what it did before, and why it is less."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import attrs

from kvplug.assembly.slow_path import processors
from kvplug.config import Config
from kvplug.metrics.path_rate import Finding
from kvplug.metrics.stats import TransferStats
from kvplug.metrics.store_rate import REFUSED_S, MeasuredStore, StoreOp, StoreWatch
from kvplug.transport.store.store import Store

_log = logging.getLogger(__name__)

_WORDS: dict[StoreOp, tuple[str, str]] = {
    "get": ("loading from", "loads nothing from it"),
    "put": ("saving to", "saves nothing to it"),
}


@attrs.frozen(kw_only=True)
class SlowStoreAlarm:
    """What is told and counted of one opened store."""

    config: Config
    stats: TransferStats
    name: str

    def around(self, store: Store) -> Store:
        """The store, measured from now on unless the config does not want it."""
        if self.config.slow_path == "off":
            return store
        refuses = self.config.slow_path == "refuse"

        def tell(op: StoreOp, finding: Finding) -> None:
            self.stats.slow_store(op, self.name)
            doing, refusing = _WORDS[op]
            then = f". kvplug {refusing} for {REFUSED_S:.0f} s at a time" if refuses else ""
            _log.warning(
                '%s the store %r %s. Likely: %s%s. slow_path = "off" stops this comparison; this is said'
                " once",
                doing,
                self.name,
                finding,
                "; ".join(self._reasons(op, store)),
                then,
            )

        return MeasuredStore(store, StoreWatch(store.medium, tell, refuses=refuses))

    def _reasons(self, op: StoreOp, store: Store) -> Iterator[str]:
        """The causes that can be seen from here, each with what to change."""
        seen = list(processors(self.config.thread_cpus))
        if route := store.route:
            seen.append(f"pages come and go like this: {route}; see whether that path is slow")
        if store.medium == "disk":
            seen.append(
                "the disk carries less, is almost full, or serves others too"
                if op == "put"
                else "pages that came out of the page cache come from the disk now, or the disk carries less"
            )
        elif store.is_shared:
            seen.append("its server, the network to it, or other programs that use it may be busy")
        yield from seen or ["no cause is seen from here"]
