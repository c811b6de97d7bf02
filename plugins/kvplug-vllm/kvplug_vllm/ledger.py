"""Whose blocks vLLM keeps until their request is named, as the scheduler side knows it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set

import attrs

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Waits:
    """Requests that vLLM begins to wait for in one step."""

    held: frozenset[str] = frozenset()
    """Until they are named as sent."""
    loading: frozenset[str] = frozenset()
    """Until they are named as received."""
    settling: frozenset[str] = frozenset()
    """Of these, the ones whose load ends in this very step."""


class Ledger:
    """Requests that load, or whose blocks are held when they have ended.

    vLLM frees a request's blocks at the first name and fails an assertion at a second one, so it is told to
    wait for one name only. A sibling in a MultiConnector may load what another would like to hold.
    """

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._loading: set[str] = set()
        self._settling: set[str] = set()
        self._elsewhere: set[str] = set()
        """Requests with blocks that no step has computed: somebody else loads them in the background."""
        self._new = Waits()

    def allocate(self, request_id: str) -> None:
        """It has blocks, and nothing of this connector's is loaded in the background."""
        self._elsewhere.add(request_id)

    def load(self, request_id: str, *, settles: bool) -> None:
        """It waits for a load. ``settles``: which ends in its step, so the connector knows of no waiting."""
        self._loading.add(request_id)
        loading, settling = self._new.loading | {request_id}, self._new.settling
        if settles:
            self._settling.add(request_id)
            settling |= {request_id}
        self._new = attrs.evolve(self._new, loading=loading, settling=settling)

    def end(self, request_id: str, *, keeps: bool) -> bool:
        """It has ended, and the connector would keep its blocks. Returns whether vLLM is to wait for it."""
        elsewhere = request_id in self._elsewhere
        self._elsewhere.discard(request_id)
        if not keeps:
            return False
        if elsewhere:
            _log.error(
                "the connector keeps the blocks of %s, into which another one still loads: they are freed"
                " when that has ended",
                request_id,
            )
            return False
        if request_id not in self._loading:  # one that still loads is named as received instead
            self._held.add(request_id)
            self._new = attrs.evolve(self._new, held=self._new.held | {request_id})
        return True

    def begin_step(self, scheduled: Iterable[str]) -> Waits:
        """A step is planned. Returns whom the workers must be told of."""
        self._elsewhere.difference_update(scheduled)
        new, self._new = self._new, Waits()
        return new

    def settle(self, sent: Set[str], received: Set[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Requests were named. Returns those that this connector kept, or loaded in the background."""
        ours = frozenset(sent & self._held), frozenset(received & self._loading - self._settling)
        self._held -= sent
        self._loading -= received
        self._settling -= received
        return ours
