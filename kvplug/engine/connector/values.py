"""The immutable values that an engine and a connector exchange, independent of any engine's types.

An adapter translates between these values and its engine's objects. A connector's two sides exchange only
plain values (:data:`Plain`), so that any engine can carry them in any way.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from kvplug.engine.layout import KVLayout
from kvplug.errors import LayoutError

Plain = None | bool | int | float | str | bytes | Sequence[Any] | Mapping[Any, Any]
"""None, bool, int, float, str, bytes, and lists, tuples and dicts of these; nothing else."""

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids of one request, one tuple for each KV cache group, in token order. A group with a window has
:data:`NO_BLOCK` for blocks that lie wholly before the window."""

NO_BLOCK: Final = -1
"""In :data:`BlockIds`: the engine has freed this block or never allocated it, since nothing reads it."""


class Side(enum.StrEnum):
    """The two sides of a connector: in the engine's scheduler, and in its workers."""

    SCHEDULER = "scheduler"
    """Decides what is loaded and saved; one for each engine."""
    WORKER = "worker"
    """Moves KV; one for each worker."""


@attrs.frozen(kw_only=True)
class CacheGroup:
    """Layers whose blocks are numbered together and lie in memory the same way."""

    layer_names: tuple[str, ...]
    """The layers' names, in the order in which the forward pass visits them."""
    layout: KVLayout
    """The layout of one layer's tensor as passed to ``register_kv_caches``."""
    window: int | None = None
    """How many tokens these layers attend to, including the newest; earlier blocks are freed while a request
    runs. ``None`` means all tokens, and every block is kept until the request ends."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size


@attrs.frozen(kw_only=True)
class KVCacheConfig:
    """The paged KV cache of one worker."""

    groups: tuple[CacheGroup, ...]
    """Groups of layers, each with its own block numbers."""
    num_blocks: int
    """Blocks of each layer; every block id is less than this."""
    forward_order: tuple[str, ...] = ()
    """The layers of all groups in the order in which the forward pass visits them. Required with several
    groups, since pages have their layers in this order.

    Raises:
        LayoutError: the order is missing, or does not name each layer of the groups once.
    """

    def __attrs_post_init__(self) -> None:
        named = [name for group in self.groups for name in group.layer_names]
        if not self.forward_order and len(self.groups) <= 1:
            object.__setattr__(self, "forward_order", tuple(named))
        if sorted(named) != sorted(self.forward_order):
            raise LayoutError(
                f"forward_order names {len(self.forward_order)} layers, but the {len(self.groups)} KV cache"
                f" groups have {len(named)}: it must name each layer of the groups once"
            )


@attrs.frozen(kw_only=True)
class Parallelism:
    """The place of this worker among the workers that share a model."""

    worker_rank: int = 0
    """This worker's rank in its engine. Its control port is the config's port plus this rank."""
    num_workers: int = 1
    """The number of workers in the engine. Each loads from the peer engine's worker of the same rank."""
    tensor_rank: int = 0
    """Which shard of the heads this worker has."""
    tensor_size: int = 1
    """The number of workers that share the heads."""
    first_layer: int = 0
    """The first layer of this pipeline stage."""
    end_layer: int | None = None
    """One past the last layer of this pipeline stage; ``None`` for the model's end."""


@attrs.frozen(kw_only=True)
class Request:
    """One request as the scheduler side sees it."""

    request_id: str
    """Unique in the engine while the request lives."""
    token_ids: tuple[int, ...]
    """The prompt, then the generated tokens."""
    num_prompt_tokens: int
    """How many of ``token_ids`` are the prompt."""
    extra: bytes = b""
    """Everything besides the tokens that determines the KV: adapter, media hashes, cache salt. Opaque."""
    generation: int = 0
    """Grows each time the request is preempted or recomputed from scratch."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """``kv_transfer_params`` of the client's request."""
    block_hashes: Sequence[bytes] = attrs.field(default=(), eq=False, repr=False)
    """The engine's own hashes of the request's whole blocks, in order, as in its events; empty if the engine
    has no hashes. May grow while the request runs."""
    adapter: str = ""
    """Name of the adapter (LoRA) in ``extra``, for events."""


class RequestEnd(enum.StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    """All tokens were generated."""
    ABORTED = "aborted"
    """The client or the engine cancelled it."""
    FAILED = "failed"
    """An error ended it, such as a failed load."""


@attrs.frozen(kw_only=True)
class ScheduledRequest:
    """The work of one step for one request."""

    request_id: str
    """As in :class:`Request`."""
    num_computed_tokens: int
    """Tokens whose KV is in the blocks before this step, including loaded tokens."""
    num_scheduled_tokens: int
    """Tokens that this step computes."""


@attrs.frozen(kw_only=True)
class SchedulerOutput:
    """The engine scheduler's plan for one step."""

    step: int
    """Grows with each step."""
    scheduled: tuple[ScheduledRequest, ...]
    """The requests that this step computes."""
    block_ids: Callable[[str], BlockIds] = attrs.field(eq=False, repr=False)
    """Given the id of a request that this step schedules, returns all its blocks so far. Valid only during
    ``build_connector_meta``. It is a function because copying every table in every step is too expensive."""
    token_ids: Callable[[str], Sequence[int]] | None = attrs.field(default=None, eq=False, repr=False)
    """Given the id of a request that this step schedules, returns its tokens so far: the prompt, then
    generated and accepted tokens, never drafts or placeholders. Valid as long as ``block_ids``. ``None`` if
    the engine does not provide tokens; then only prompts can be saved."""
    preempted_request_ids: frozenset[str] = frozenset()
    """Requests whose blocks may be overwritten in this very step."""
    finished_request_ids: frozenset[str] = frozenset()
    """Requests that ended since the previous step."""


@attrs.frozen(kw_only=True)
class WorkerOutput:
    """What the worker sides report to the scheduler side after a step, aggregated over workers."""

    finished_sending: frozenset[str] = frozenset()
    """Ids of requests whose blocks every worker has saved or sent, so that the engine may free them."""
    finished_recving: frozenset[str] = frozenset()
    """Ids of requests whose loads have ended, successfully or not, in every worker."""
    invalid_block_ids: frozenset[int] = frozenset()
    """Blocks that some worker could not load. The engine recomputes their tokens."""
    worker_metadata: tuple[Plain, ...] = ()
    """The metadata of each worker that returned any, in any order."""
    stats: Mapping[str, Any] | None = None
    """A snapshot of TransferStats, merged over workers."""


@attrs.frozen(kw_only=True)
class CacheEvent:
    """An event for a router that sends requests where their KV is cached."""

    kind: Literal["stored", "removed", "cleared"]
    """``stored``: these blocks are cached now. ``removed``: they no longer are. ``cleared``: no block is
    cached in any medium."""
    block_hashes: tuple[bytes, ...] = ()
    """The engine's own hashes if it has any, else the connector's."""
    medium: str = ""
    """Where the blocks are or were cached, in the engine's words, such as "CPU" or "STORAGE"."""
    owner: str = ""
    """Name of the store."""
    token_ids: tuple[int, ...] = ()
    """For ``stored``: the tokens of all blocks, one after the other."""
    block_size: int = 0
    """For ``stored``: tokens in a block."""
    parent_hash: bytes | None = None
    """For ``stored``: the hash of the block before the first one, or ``None`` at the sequence's beginning."""
    adapter: str = ""
    """For ``stored``: name of the adapter (LoRA) that the blocks were computed with."""
    chains: tuple[bytes, ...] = ()
    """For ``stored``: kvplug's own hashes of the pages in the blocks."""
