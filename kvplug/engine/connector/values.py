"""The values that cross between an engine and a connector: frozen, neutral, without engine types.

An adapter translates its engine's objects into these and back. What crosses between a connector's
two sides (:data:`Plain`) is made of plain values only, so that any engine can carry it in any way.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from kvplug.engine.layout import KVLayout
from kvplug.errors import LayoutError

Plain = None | bool | int | float | str | bytes | Sequence[Any] | Mapping[Any, Any]
"""None, bool, int, float, str, bytes, list, tuple, dict of these. Nothing else crosses."""

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids of one request, one tuple for each KV cache group, in token order. A group with a window has
:data:`NO_BLOCK` for blocks that lie wholly before it."""

NO_BLOCK: Final = -1
"""In :data:`BlockIds`: the engine has freed this block, or never had one there, since nothing reads it."""


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
    """In the order in which the forward pass visits them."""
    layout: KVLayout
    """The layout of one layer's tensor as passed to ``register_kv_caches``."""
    window: int | None = None
    """How many tokens these layers attend to, the newest one included; earlier blocks are freed while a
    request runs. ``None``: all tokens, and every block is kept until the request ends."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size


@attrs.frozen(kw_only=True)
class KVCacheConfig:
    """The paged KV cache of one worker."""

    groups: tuple[CacheGroup, ...]
    """Groups of layers, each with block numbers of its own."""
    num_blocks: int
    """Blocks of each layer; block ids are below it."""
    forward_order: tuple[str, ...] = ()
    """The layers of all groups in the order in which the forward pass visits them. Needed with several
    groups: pages have their layers in this order, however an engine groups them.

    Raises:
        LayoutError: it is missing, or does not name each layer of the groups once.
    """

    def __attrs_post_init__(self) -> None:
        named = [name for group in self.groups for name in group.layer_names]
        if not self.forward_order and len(self.groups) <= 1:
            object.__setattr__(self, "forward_order", tuple(named))
        if sorted(named) != sorted(self.forward_order):
            raise LayoutError(
                f"forward_order names {len(self.forward_order)} layers, and the {len(self.groups)} KV cache"
                f" groups have {len(named)}: it has each layer of the groups once"
            )


@attrs.frozen(kw_only=True)
class Parallelism:
    """The place of this worker among the workers that share a model."""

    worker_rank: int = 0
    """Of this worker in its engine; its control address is the config's port plus this."""
    num_workers: int = 1
    """Of the engine: each loads from the peer engine's worker of the same rank."""
    tensor_rank: int = 0
    """Which shard of the heads this worker has."""
    tensor_size: int = 1
    """Workers among which the heads are split."""
    first_layer: int = 0
    """Of this pipeline stage."""
    end_layer: int | None = None
    """One past the last layer of this pipeline stage; ``None`` is the model's end."""


@attrs.frozen(kw_only=True)
class Request:
    """One request as the scheduler side sees it."""

    request_id: str
    """Unique in the engine while the request lives."""
    token_ids: tuple[int, ...]
    """The prompt, then what has been generated."""
    num_prompt_tokens: int
    """How many of ``token_ids`` are the prompt."""
    extra: bytes = b""
    """What determines the KV besides the tokens: adapter, media hashes, cache salt. Opaque."""
    generation: int = 0
    """Grows each time the request is preempted or recomputed from scratch."""
    params: Mapping[str, Any] = attrs.field(factory=dict)
    """``kv_transfer_params`` of the client's request."""
    block_hashes: Sequence[bytes] = attrs.field(default=(), eq=False, repr=False)
    """The engine's own hashes of the request's whole blocks, in order, as its events name them; empty where
    it has none. May grow while the request runs."""
    adapter: str = ""
    """Name of the adapter (LoRA) in ``extra``, for events."""


class RequestEnd(enum.StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    """All tokens were generated."""
    ABORTED = "aborted"
    """The client or the engine gave it up."""
    FAILED = "failed"
    """An error ended it, such as a load that failed."""


@attrs.frozen(kw_only=True)
class ScheduledRequest:
    """The work of one step for one request."""

    request_id: str
    """As in :class:`Request`."""
    num_computed_tokens: int
    """Tokens whose KV is in the blocks before this step, loaded ones included."""
    num_scheduled_tokens: int
    """Tokens this step computes."""


@attrs.frozen(kw_only=True)
class SchedulerOutput:
    """One step's plan, as the engine's scheduler made it."""

    step: int
    """Grows with each step."""
    scheduled: tuple[ScheduledRequest, ...]
    """The requests that this step computes."""
    block_ids: Callable[[str], BlockIds] = attrs.field(eq=False, repr=False)
    """All blocks so far of a request that this step schedules, by its id; looked up on demand, and valid
    during ``build_connector_meta`` only. Copying every table in every step would cost more than the step
    saves."""
    token_ids: Callable[[str], Sequence[int]] | None = attrs.field(default=None, eq=False, repr=False)
    """The token ids known so far of a request that this step schedules, by its id: the prompt, then what was
    generated and accepted, never drafts or placeholders. Valid as ``block_ids``. ``None``: the engine does
    not say, and only prompts can be saved."""
    preempted_request_ids: frozenset[str] = frozenset()
    """Their blocks may be overwritten in this very step."""
    finished_request_ids: frozenset[str] = frozenset()
    """Ended since the step before."""


@attrs.frozen(kw_only=True)
class WorkerOutput:
    """The reports of worker sides to the scheduler side after a step, aggregated over workers."""

    finished_sending: frozenset[str] = frozenset()
    """Ids of requests whose blocks every worker has saved or sent: the engine may free them."""
    finished_recving: frozenset[str] = frozenset()
    """Ids of requests whose blocks every worker has loaded, or failed to."""
    invalid_block_ids: frozenset[int] = frozenset()
    """Blocks that could not be loaded on some worker: the engine recomputes their tokens."""
    worker_metadata: tuple[Plain, ...] = ()
    """The metadata of each worker that returned any, in no particular order."""
    stats: Mapping[str, Any] | None = None
    """A snapshot of TransferStats, merged over workers."""


@attrs.frozen(kw_only=True)
class CacheEvent:
    """An event for a router that sends requests where their KV is cached."""

    kind: Literal["stored", "removed", "cleared"]
    """What happened: these blocks are cached from now on, or no more; or no block is, whatever its medium."""
    block_hashes: tuple[bytes, ...] = ()
    """The engine's own, where it has some; else the connector's."""
    medium: str = ""
    """Where they are, or were, cached, in the engine's words: "CPU", "STORAGE"."""
    owner: str = ""
    """Name of the store."""
    token_ids: tuple[int, ...] = ()
    """Of ``stored``: those of all blocks, one after the other."""
    block_size: int = 0
    """Of ``stored``: tokens in a block."""
    parent_hash: bytes | None = None
    """Of ``stored``: the hash of the block before the first one; ``None``: it begins the sequence."""
    adapter: str = ""
    """Of ``stored``: name of the adapter (LoRA) that it was computed with."""
    chains: tuple[bytes, ...] = ()
    """Of ``stored``: kvplug's own hashes of the pages that the blocks consist of."""
