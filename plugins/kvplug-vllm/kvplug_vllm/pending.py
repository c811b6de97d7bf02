"""The requests whose blocks vLLM keeps until a worker reports them.

vLLM fails an assertion, which ends its engine, if a worker reports a request that it does not wait for, or
reports one twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set

import attrs

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class NewlyPending:
    """Requests that vLLM begins to wait for in one step."""

    held: frozenset[str] = frozenset()
    """Their blocks are held until they are reported as sent."""
    loading: frozenset[str] = frozenset()
    """They load until they are reported as received."""
    settling: frozenset[str] = frozenset()
    """The loading requests whose load ends in the same step."""
    block_ids: Mapping[str, frozenset[int]] = attrs.field(factory=dict)
    """The blocks of each loading request whose failure is reported by request."""


class PendingRequests:
    """Requests that load, or that have ended and whose blocks are held.

    vLLM frees a request's blocks at the first report, so it is made to wait for one report of each request
    only. In a MultiConnector, one child may load a request whose blocks another child would hold.
    """

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._loading: set[str] = set()
        self._settling: set[str] = set()
        self._loaded_by_sibling: set[str] = set()
        """Requests with blocks that no step has computed: a sibling may load them in the background."""
        self._new = NewlyPending()

    def allocate(self, request_id: str) -> None:
        """Record a request with blocks that this connector does not load in the background."""
        self._loaded_by_sibling.add(request_id)

    def load(self, request_id: str, *, settles: bool, block_ids: frozenset[int] | None = None) -> None:
        """Record a request that waits for a load.

        Args:
            settles: the load ends in its step, without the connector's report.
            block_ids: its blocks, if its failure is reported by request.
        """
        self._loading.add(request_id)
        if block_ids is not None:
            known = {**self._new.block_ids, request_id: block_ids}
            self._new = attrs.evolve(self._new, block_ids=known)
        loading, settling = self._new.loading | {request_id}, self._new.settling
        if settles:
            self._settling.add(request_id)
            settling |= {request_id}
        self._new = attrs.evolve(self._new, loading=loading, settling=settling)

    def end(self, request_id: str, *, keeps: bool) -> bool:
        """Record a request's end. Returns whether vLLM waits for it, if the connector keeps its blocks."""
        loads_elsewhere = request_id in self._loaded_by_sibling
        self._loaded_by_sibling.discard(request_id)
        if not keeps:
            return False
        if loads_elsewhere:
            _log.error(
                "the connector keeps the blocks of %s, into which another connector still loads: they are"
                " freed when that load has ended",
                request_id,
            )
            return False
        if request_id not in self._loading:  # a request that still loads is reported as received instead
            self._held.add(request_id)
            self._new = attrs.evolve(self._new, held=self._new.held | {request_id})
        return True

    def begin_step(self, scheduled: Iterable[str]) -> NewlyPending:
        """Begin a planned step. Returns the requests that the workers must track."""
        self._loaded_by_sibling.difference_update(scheduled)
        new, self._new = self._new, NewlyPending()
        return new

    def settle(self, sent: Set[str], received: Set[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Remove reported requests. Returns those that this connector held, or loaded in the background."""
        ours = frozenset(sent & self._held), frozenset(received & self._loading - self._settling)
        self._held -= sent
        self._loading -= received
        self._settling -= received
        return ours
