"""The scheduler side of the connector "memory"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from kvplug import ConfigError, KvplugError, PeerGoneError
from kvplug.engine import (
    BlockIds,
    ConnectorContext,
    Plain,
    Request,
    RequestEnd,
    SchedulerConnector,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.kit import Reason
from kvplug_testing.memory.connector.table import EntryTable, kv_format_of

PARAMS = "memory"
"""The key of its reference among a request's params."""
LEASE_S = 60.0
"""How long KV of a finished request is not evicted, and its reference is valid."""


class OrderError(KvplugError, RuntimeError):
    """A call came out of the documented order. The message says which."""


@attrs.define
class _Tracked:
    """The record of a request between its first call and its last."""

    request: Request
    answered: tuple[int, int] = (0, 0)
    """The numbers of computed and of promised tokens in the latest query."""
    num_sure: int | None = None
    """Tokens before its first step that no other connector of the engine can be loading; ``None``: it has no
    blocks since the latest query."""
    num_planned: int = 0
    """Tokens that the planned steps compute or have computed."""
    is_loading: bool = False
    is_refused: bool = False
    """Its reference is invalid, and this is already counted."""
    is_old: bool = False
    """Its blocks may have KV from before a reset, until its first token is computed again."""


class MemoryScheduler(SchedulerConnector):
    """Decides what is loaded and saved; see the drawing in :mod:`kvplug_testing.memory.connector`."""

    in_one_process: ClassVar[bool] = True
    """Tells the conformance kit that its peer cannot be in another process."""

    def __init__(self, context: ConnectorContext) -> None:
        if len(context.cache.groups) != 1 or context.parallelism.num_workers != 1:
            raise ConfigError("connector 'memory' serves one worker, and one KV cache group")
        self._context = context
        self._contact = context.config.control_address()
        self._layout = context.cache.groups[0].layout
        self._block_size = self._layout.block_size
        role = context.config.require_role()
        self._produces, self._consumes = role.produces, role.consumes
        self._in_background = context.options.async_load or context.loads_in_background
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[dict[str, Any]] = []
        self._saves: list[dict[str, Any]] = []
        self._unsent: set[str] = set()
        """Requests whose blocks are kept until they are saved."""
        self._heard = 0
        """The latest step with a reported load that failed, or that another connector may have made."""

    # -- one request ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._tracked[request.request_id] = _Tracked(request)

    def _known(self, request: Request, call: str) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            raise OrderError(f"{call} was called for {request.request_id}, which is not among the requests")
        tracked.request = request
        return tracked

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._known(request, "get_num_new_matched_tokens")
        tracked.answered, tracked.num_sure = (num_computed_tokens, 0), None
        if not self._consumes or num_computed_tokens % self._layout.granule:
            return 0, False
        held = self._held(tracked)
        if held is None:
            return None, False
        usable = min(held, len(request.token_ids) - 1)  # the last token is always computed
        new = usable // self._block_size * self._block_size - num_computed_tokens
        if new <= 0:
            return 0, False
        tracked.answered = (num_computed_tokens, new)
        return new, self._in_background

    def _held(self, tracked: _Tracked) -> int | None:
        """The number of leading tokens that can be loaded; ``None`` if it is not known yet."""
        request = tracked.request
        try:
            if PARAMS not in request.params:
                return self._peer().match(request.extra, request.token_ids)
            held = self._peer().resolve(request.params[PARAMS], request.extra, request.token_ids)
            return self._refused(tracked, held) if isinstance(held, Reason) else held
        except PeerGoneError:
            return self._refused(tracked, Reason.PEER_GONE) if PARAMS in request.params else 0

    def _refused(self, tracked: _Tracked, reason: Reason) -> int:
        if not tracked.is_refused:
            tracked.is_refused = True
            self._context.stats.fail("match", reason)
        return 0

    def _peer(self) -> EntryTable:
        """The table of the peer, from which it loads.

        Raises:
            PeerGoneError: no engine has this address, or its KV has another format.
        """
        table = EntryTable.at(self._contact)
        if table.kv_format != kv_format_of(self._context):
            raise PeerGoneError(f"the engine at {self._contact} has another model or layout")
        return table

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._known(request, "update_state_after_alloc")
        (start, promised), tracked.answered = tracked.answered, (0, 0)
        if tracked.num_sure is None:
            tracked.num_sure = start + num_external_tokens
        else:  # it has waited for a load, and its report has come
            tracked.num_sure = len(request.token_ids)
        if num_external_tokens == 0:
            return
        if num_external_tokens > promised:
            raise OrderError(
                f"update_state_after_alloc was called for {num_external_tokens} external tokens of"
                f" {request.request_id}, and {promised} were promised last"
            )
        end = start + num_external_tokens
        tracked.is_loading = self._in_background
        self._loads.append(
            {
                "request": request.request_id,
                "extra": request.extra,
                "tokens": request.token_ids[:end],
                "start": start,
                "blocks": block_ids[0][: -(-end // self._block_size)],
                "in_background": tracked.is_loading,
            }
        )

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._known(request, "request_finished")
        del self._tracked[request.request_id]
        was_told = not self._drop_loads({request.request_id})
        if end is not RequestEnd.FINISHED or tracked.is_loading:
            return tracked.is_loading and was_told, None
        computed = min(tracked.num_planned, request.num_prompt_tokens)
        whole = computed // self._block_size * self._block_size
        if not self._produces or tracked.is_old or whole == 0:
            return False, None
        table, tokens = EntryTable.at(self._contact), request.token_ids[:whole]
        reference = table.lease((request.extra, tokens), request, LEASE_S)
        self._unsent.add(request.request_id)
        self._saves.append(
            {
                "request": request.request_id,
                "extra": request.extra,
                "tokens": tokens,
                "blocks": block_ids[0][: whole // self._block_size],
                "ticket": reference["ticket"],
                "era": table.era,
            }
        )
        return True, {PARAMS: reference}

    def _drop_loads(self, request_ids: set[str] | frozenset[str]) -> bool:
        """Drop loads that no step has planned yet; returns whether there were any."""
        kept = [load for load in self._loads if load["request"] not in request_ids]
        dropped, self._loads = len(kept) < len(self._loads), kept
        return dropped

    # -- one step ------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        for request_id in output.preempted_request_ids & self._tracked.keys():
            self._tracked[request_id].num_planned = 0
        scheduled = {one.request_id for one in output.scheduled}
        self._drop_loads(output.preempted_request_ids - scheduled)
        doubted: set[int] = set()
        for one in output.scheduled:
            tracked = self._tracked.get(one.request_id)
            if tracked is None:
                raise OrderError(f"build_connector_meta schedules the unknown request {one.request_id}")
            if (tracked.num_planned or tracked.num_sure or 0) < one.num_computed_tokens:
                doubted.update(output.block_ids(one.request_id)[0])  # another connector loads into them
            tracked.is_old &= one.num_computed_tokens > 0
            tracked.num_planned = one.num_computed_tokens + one.num_scheduled_tokens
        plan = {
            "step": output.step,
            "heard": self._heard,
            "doubted": sorted(doubted),
            "loads": self._loads,
            "saves": self._saves,
        }
        self._loads, self._saves = [], []
        return plan

    def update_connector_output(self, output: WorkerOutput) -> None:
        self._unsent -= output.finished_sending
        for request_id in output.finished_recving & self._tracked.keys():
            self._tracked[request_id].is_loading = False
        for save in self._saves:
            if not output.invalid_block_ids.isdisjoint(save["blocks"]):
                save["tokens"] = ()  # it ended before its KV was known to be wrong
        for part in output.worker_metadata:
            assert isinstance(part, Mapping)
            self._heard = max(self._heard, part["step"])

    def has_pending_push_work(self) -> bool:
        return bool(self._unsent)

    # -- the engine ----------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        if not self._produces:
            return False  # it loads another engine's KV, which this call does not reset
        EntryTable.at(self._contact).clear()
        for tracked in self._tracked.values():
            tracked.is_old = True
        return True

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def shutdown(self) -> None:
        self._context.close()
