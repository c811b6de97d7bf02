"""The plan of a step, and the reports of the workers after it. Both cross as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs

from kvplug.engine import BlockIds, ChainMemo
from kvplug.net.wire import from_plain, to_plain
from kvplug_lookup.connector.keys import Shard

_TOKEN_BYTES = 4


@attrs.frozen(kw_only=True)
class PagePlan:
    """Consecutive pages of one request's tokens."""

    request_id: str
    first_page: int
    """Number of the first page in the sequence."""
    parent: bytes
    """The chain of the page before it."""
    packed_tokens: bytes = attrs.field(repr=False)
    """The token ids of all pages: int32, little-endian."""
    block_ids: BlockIds
    """For each KV cache group the request's blocks, from the first one to the one with the pages' last token;
    ``NO_BLOCK`` if a block is missing."""
    traceparent: str = ""
    """The context of the request in its trace."""

    def pages(self, page_tokens: int) -> tuple[list[bytes], list[bytes]]:
        """The chains of the pages, and their identities."""
        step, parent = page_tokens * _TOKEN_BYTES, self.parent
        chains, identities = [], []
        for at in range(0, len(self.packed_tokens), step):
            tokens = self.packed_tokens[at : at + step]
            identities.append(parent + tokens)
            parent = ChainMemo.next_chain(parent, tokens)
            chains.append(parent)
        return chains, identities


@attrs.frozen(kw_only=True)
class LoadPlan(PagePlan):
    """Load tokens ``start`` to ``end`` of a request from these pages into its blocks."""

    start: int
    end: int
    sources: tuple[tuple[tuple[str, int], ...], ...]
    """For each worker, runs of pages in order: the source, and the number of pages."""
    in_background: bool


@attrs.frozen(kw_only=True)
class SavePlan(PagePlan):
    """Save these pages, whose last tokens this step computes."""

    num_announced: int
    """How many leading pages need no announcement of a reader: they have one, or no engine loads them."""


@attrs.frozen(kw_only=True)
class StepPlan:
    """Everything that one step does."""

    step: int = 0
    """The engine's number of the step."""
    last_report: int = -1
    """The latest step whose report the scheduler side had received when it made this plan. With several steps
    in flight, it may not be the step before."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    forget: tuple[str, ...] = ()
    """Requests that ended or were preempted: stop all work for them."""
    ended: tuple[str, ...] = ()
    """Requests that ended, whose blocks the engine keeps until the workers have read their pages."""
    reset: bytes = b""
    """First forget all pages saved so far. The bytes are new for each reset; empty: no reset."""
    doubted: frozenset[int] = frozenset()
    """Blocks that must not be saved from until the scheduler side has received the report of this step."""
    num_tokens: int = 0
    """Tokens that the step computes, if its time measures prefill; otherwise 0."""
    left: tuple[str, ...] = ()
    """Sources of engines that have left. Applied before ``joined``."""
    joined: tuple[tuple[str, tuple[str, ...]], ...] = attrs.field(default=(), repr=False)
    """Sources of engines that have joined, and the contacts of their workers, by rank."""

    def to_plain(self) -> dict[str, Any]:
        plain = attrs.asdict(self, recurse=False)  # most steps load and save nothing
        plain["loads"] = [attrs.asdict(load) for load in self.loads]
        plain["doubted"] = sorted(self.doubted)
        plain["saves"] = [attrs.asdict(save) for save in self.saves]
        return plain

    @classmethod
    def from_plain(cls, plain: object) -> StepPlan:
        """Invert :meth:`to_plain`; tuples may have become lists.

        Raises:
            WireError: these are not the values of a plan.
        """
        return from_plain(plain, cls, "plan of a step")


@attrs.define(kw_only=True)
class StepReport:
    """What a worker has learned since its last report."""

    failed_loads: set[str] = attrs.field(factory=set)
    """Requests whose load failed."""
    spoilt_saves: set[str] = attrs.field(factory=set)
    """Requests whose pages were not saved because their KV may be wrong."""
    stalled: set[str] = attrs.field(factory=set)
    """Sources that nothing arrived from."""
    slow: set[str] = attrs.field(factory=set)
    """Sources that were refused because they are slow."""
    refused: set[str] = attrs.field(factory=set)
    """Peers that refused a handshake, or whose pages do not fit. Scheduler sides do not know of it."""
    unreadable: list[tuple[str, bytes]] = attrs.field(factory=list)
    """The source and the chain of each page that exists but could not be read."""
    rank: int = 0
    step: int = -1
    reset: bool = False
    """The worker has forgotten all pages, as the plan of ``step`` demands."""
    settled: list[bytes] = attrs.field(factory=list)
    """Chains of pages that were saved in the first store, or given up, if that store has no events."""
    unsaved: dict[str, int] = attrs.field(factory=dict)
    """By request, the first page that was not saved."""
    read_until: int = -1
    """The last step whose pages the stores have read from the engine's blocks."""
    costs: dict[str, tuple[float, float]] | None = None
    """As :meth:`MeasuredCosts.take` returns them."""
    shard: Shard | None = None
    """In the first report."""

    def to_plain(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], to_plain(self))

    @classmethod
    def from_plain(cls, plain: object) -> StepReport:
        """Invert :meth:`to_plain`.

        Raises:
            WireError: these are not the values of a report.
        """
        return from_plain(plain, cls, "report of a worker")
