"""The scheduler side: it decides what is loaded and what is saved, and touches no tensor.

A prompt is saved when its request has ended: the engine keeps the blocks until every worker has written them
into the folder. What another prompt shares with one that is there is loaded in the request's first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvplug import ConfigError, KvplugError
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
from kvplug_shelf.folder import Catalogue, Prompt, Published, folder_of, form_of

_log = logging.getLogger(__name__)


class OrderError(KvplugError, RuntimeError):
    """The engine made a call out of the documented order. The message says which."""


@attrs.define
class Tracked:
    """The state of a request between its first call and its last."""

    start: int = 0
    """Computed tokens at the last match."""
    promised: int = 0
    """Tokens beyond those that it may load."""
    entry: Path | None = None
    """The entry that holds them."""
    num_computed: int = 0
    """Tokens that the steps planned so far compute or have computed."""
    has_failed: bool = False
    """A load failed: the request is computed, without a second load."""
    is_old: bool = False
    """Some of its KV is from before a reset."""


@attrs.define
class Saving:
    """A prompt whose blocks are kept until all workers have it in the folder."""

    entry: Path
    prompt: Prompt
    blocks: tuple[int, ...]
    is_told: bool = False
    """It is in the plan of a step."""
    is_spoilt: bool = False
    """Some of its KV is wrong, or could not be written."""


class ShelfScheduler(SchedulerConnector):
    def __init__(self, context: ConnectorContext) -> None:
        if len(context.cache.groups) != 1:
            raise ConfigError("the connector 'shelf' serves one KV cache group")
        self._context, self._layout = context, context.cache.groups[0].layout
        role, folder, form = context.config.require_role(), folder_of(context), form_of(context)
        self._published = Published(folder, form, context.config.buffer_size) if role.produces else None
        self._catalogue = Catalogue(folder, form) if role.consumes else None
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[dict[str, Any]] = []
        self._saving: dict[str, Saving] = {}
        self._heard = 0  # the last step of which a failed load was reported

    # -- one request ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._tracked[request.request_id] = Tracked()

    def _of(self, request_id: str, call: str) -> Tracked:
        if request_id not in self._tracked:
            raise OrderError(
                f"{call} came for request {request_id} before on_new_request, or after request_finished"
            )
        return self._tracked[request_id]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._of(request.request_id, "get_num_new_matched_tokens")
        tracked.start, tracked.promised = num_computed_tokens, 0
        if self._catalogue is None or tracked.has_failed or num_computed_tokens % self._layout.granule:
            return 0, False
        tracked.entry, held = self._catalogue.match(request.extra, request.token_ids)
        usable = min(held, len(request.token_ids) - 1)  # one token at least is computed
        whole = usable // self._layout.block_size * self._layout.block_size
        tracked.promised = max(0, whole - num_computed_tokens)
        return tracked.promised, False

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._of(request.request_id, "update_state_after_alloc")
        if num_external_tokens == 0:
            return
        if num_external_tokens > tracked.promised:
            raise OrderError(
                f"update_state_after_alloc came with {num_external_tokens} external tokens of request"
                f" {request.request_id}, and {tracked.promised} were promised"
            )
        end = tracked.start + num_external_tokens
        self._loads.append(
            {
                "request": request.request_id,
                "entry": str(tracked.entry),
                "start": tracked.start,
                "end": end,
                "blocks": block_ids[0][: -(-end // self._layout.block_size)],
            }
        )
        tracked.promised = 0

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._of(request.request_id, "request_finished")
        del self._tracked[request.request_id]
        self._drop_loads(frozenset({request.request_id}))
        size = self._layout.block_size
        num_blocks = min(tracked.num_computed, request.num_prompt_tokens) // size
        if self._published is None or end is not RequestEnd.FINISHED or tracked.is_old or not num_blocks:
            return False, None
        self._saving[request.request_id] = Saving(
            entry=self._published.reserve(),
            prompt=(request.extra, request.token_ids[: num_blocks * size]),
            blocks=block_ids[0][:num_blocks],
        )
        return True, None

    def _drop_loads(self, request_ids: frozenset[str]) -> None:
        """Loads that are in no step's plan yet."""
        self._loads = [load for load in self._loads if load["request"] not in request_ids]

    # -- one step ------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        scheduled = {each.request_id for each in output.scheduled}
        for request_id in output.preempted_request_ids & self._tracked.keys():
            self._tracked[request_id].num_computed = 0
        self._drop_loads(output.preempted_request_ids - scheduled)
        for each in output.scheduled:
            tracked = self._of(each.request_id, "build_connector_meta")
            tracked.is_old &= each.num_computed_tokens > 0
            tracked.num_computed = each.num_computed_tokens + each.num_scheduled_tokens
        saves = []
        for request_id, saving in self._saving.items():
            if not saving.is_told:
                saving.is_told = True
                saves.append(
                    {
                        "request": request_id,
                        "entry": str(saving.entry),
                        "num_tokens": len(saving.prompt[1]),
                        "blocks": () if saving.is_spoilt else saving.blocks,
                    }
                )
        meta = {"step": output.step, "heard": self._heard, "loads": self._loads, "saves": saves}
        self._loads = []
        return meta

    def update_connector_output(self, output: WorkerOutput) -> None:
        for saving in self._saving.values():
            if not saving.is_told and not output.invalid_block_ids.isdisjoint(saving.blocks):
                saving.is_spoilt = True  # it ended before it was known that its KV is wrong
        for said in output.worker_metadata:
            assert isinstance(said, Mapping)
            if said["failed"]:
                self._heard = max(self._heard, said["step"])
            for request_id in said["failed"]:
                if request_id in self._tracked:
                    self._tracked[request_id].has_failed = True
            for request_id in said["unsaved"]:
                if request_id in self._saving:
                    self._saving[request_id].is_spoilt = True
        for request_id in output.finished_sending:
            saving = self._saving.pop(request_id)
            assert self._published is not None
            try:
                if saving.is_spoilt:
                    self._published.remove(saving.entry)
                else:
                    self._published.add(saving.entry, saving.prompt)
            except KvplugError as e:  # the engine goes on, and computes that prompt again
                _log.warning("%s is not published: %s", saving.entry, e)

    def has_pending_push_work(self) -> bool:
        return bool(self._saving)

    # -- the whole -----------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        if self._published is None:
            return False  # what it loads is another engine's, which does not forget by being asked here
        self._published.begin()
        for tracked in self._tracked.values():
            tracked.is_old = True
        return True

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def shutdown(self) -> None:
        if self._published is not None:
            self._published.close()
        self._context.close()
