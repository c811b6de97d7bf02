"""The connector "memory": what one engine of this process has computed, another loads. For tests.

::

    scheduler side                                worker side
    get_num_new_matched_tokens   looks into the peer's shelf, or at the reference that the request carries
    update_state_after_alloc     plans a load  ->   start_load_kv copies, or a later step does (async_load)
    request_finished             plans a save,
                                 keeps blocks  ->   a later step copies them and names the request as sent

Written to be read. Nothing runs beside the engine's own calls: what is in the background waits for a later
step. Both sides and the peer engine are in one process, and the shelf (:mod:`kvplug.testing.memory.shelf`) is
all that they share; whatever else one side tells the other goes through metadata, as between processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.checksum import digest
from kvplug.connector.scheduler import SchedulerConnector
from kvplug.connector.values import BlockIds, Plain, Request, RequestEnd, SchedulerOutput, WorkerOutput
from kvplug.connector.worker import WorkerConnector
from kvplug.context import ConnectorContext
from kvplug.errors import (
    ClosedError,
    ConfigError,
    EntryGoneError,
    IntegrityError,
    KvplugError,
    LayoutError,
    PeerGoneError,
    TimeoutError,
)
from kvplug.layout import gather, scatter
from kvplug.metrics.reasons import Reason, reason_of
from kvplug.testing.memory.reference import Reference, StaleError
from kvplug.testing.memory.shelf import Entry, Shelf
from kvplug.wire.tensors import memory_of

if TYPE_CHECKING:
    from torch import Tensor

PARAMS = "memory"
"""The key of its reference among a request's params."""


class OrderError(KvplugError, RuntimeError):
    """A call came out of the documented order. The message says which."""


def form_of(context: ConnectorContext) -> tuple[Any, ...]:
    """What must be equal at two engines for the KV of one to mean the same to the other."""
    layout, model = context.cache.groups[0].layout, attrs.evolve(context.model, name="")
    inside = (layout.axes, layout.block_format, layout.block_size) if layout.block_format else ()
    return model, layout.num_kv_heads, layout.head_size, layout.has_values, inside


@attrs.define
class _Tracked:
    """What is remembered of a request between its first call and its last."""

    request: Request
    answered: tuple[int, int] = (0, 0)
    """Tokens computed when it was last asked about, and tokens promised then."""
    num_planned: int = 0
    """Tokens that the steps planned so far compute or have computed."""
    is_loading: bool = False
    has_failed: bool = False
    """A load failed: it is computed from now on, without another try."""
    is_refused: bool = False
    """Its reference is good for nothing, and that was counted."""
    is_old: bool = False
    """It may hold KV from before a reset; until its first token is computed again."""


class MemoryScheduler(SchedulerConnector):
    """Decides; see the module's drawing."""

    def __init__(self, context: ConnectorContext) -> None:
        if len(context.cache.groups) != 1 or context.parallelism.num_workers != 1:
            raise ConfigError("connector 'memory' serves one worker, and one KV cache group")
        self._context = context
        self._contact = context.config.control_address()
        self._layout = context.cache.groups[0].layout
        self._block_size = self._layout.block_size
        role = context.config.require_role()
        self._produces, self._consumes = role.produces, role.consumes
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[dict[str, Any]] = []
        self._saves: list[dict[str, Any]] = []
        self._unsent: set[str] = set()
        """Requests whose blocks are kept until they are saved."""
        self._heard = 0
        """The latest step that a failed load was reported of."""

    # -- one request ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._tracked[request.request_id] = _Tracked(request)

    def _known(self, request: Request, call: str) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            raise OrderError(
                f"{call} was called for request {request.request_id}, and on_new_request was not, or"
                " request_finished was as well"
            )
        tracked.request = request
        return tracked

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._known(request, "get_num_new_matched_tokens")
        tracked.answered = (num_computed_tokens, 0)
        if not self._consumes or tracked.has_failed or num_computed_tokens % self._layout.granule:
            return 0, False
        held = self._held(tracked)
        if held is None:
            return None, False
        usable = min(held, len(request.token_ids) - 1)  # the last token is always computed
        new = usable // self._block_size * self._block_size - num_computed_tokens
        if new <= 0:
            return 0, False
        tracked.answered = (num_computed_tokens, new)
        return new, self._context.options.async_load

    def _held(self, tracked: _Tracked) -> int | None:
        """How many leading tokens can be loaded; ``None``: not known yet."""
        request = tracked.request
        try:
            if PARAMS not in request.params:
                return self._peer().match(request.extra, request.token_ids)
            reference = Reference.from_params(request.params[PARAMS])
            if reference.contact != self._contact:
                raise StaleError(Reason.REFUSED, "it is of an engine that is not this one's peer")
            return self._peer().resolve(reference, request.extra, request.token_ids)
        except StaleError as e:
            return self._refused(tracked, e.reason)
        except PeerGoneError:
            return self._refused(tracked, Reason.PEER_GONE) if PARAMS in request.params else 0

    def _refused(self, tracked: _Tracked, reason: Reason) -> int:
        if not tracked.is_refused:
            tracked.is_refused = True
            self._context.stats.fail("match", reason)
        return 0

    def _peer(self) -> Shelf:
        """Where loads come from.

        Raises:
            PeerGoneError: nobody keeps KV there, or none that means the same here.
        """
        shelf = Shelf.at(self._contact)
        if shelf.form != form_of(self._context):
            raise PeerGoneError(f"the engine at {self._contact} has another model or layout")
        return shelf

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._known(request, "update_state_after_alloc")
        (start, promised), tracked.answered = tracked.answered, (0, 0)
        if num_external_tokens == 0:
            return
        if num_external_tokens > promised:
            raise OrderError(
                f"update_state_after_alloc was called for {num_external_tokens} external tokens of request"
                f" {request.request_id}, and get_num_new_matched_tokens had last promised {promised}"
            )
        end = start + num_external_tokens
        tracked.is_loading = self._context.options.async_load
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
        shelf, tokens = Shelf.at(self._contact), request.token_ids[:whole]
        reference = shelf.lend(
            (request.extra, tokens),
            request_id=request.request_id,
            generation=request.generation,
            duration_s=self._context.options.lease_s,
        )
        self._unsent.add(request.request_id)
        self._saves.append(
            {
                "request": request.request_id,
                "extra": request.extra,
                "tokens": tokens,
                "blocks": block_ids[0][: whole // self._block_size],
                "lease": reference.lease,
                "era": shelf.era,
            }
        )
        return True, {PARAMS: reference.to_params()}

    def _drop_loads(self, request_ids: set[str] | frozenset[str]) -> bool:
        """Loads that no step has been told of yet; whether there were any."""
        kept = [load for load in self._loads if load["request"] not in request_ids]
        dropped, self._loads = len(kept) < len(self._loads), kept
        return dropped

    # -- one step ------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        for request_id in output.preempted_request_ids & self._tracked.keys():
            self._tracked[request_id].num_planned = 0
        scheduled = {one.request_id for one in output.scheduled}
        self._drop_loads(output.preempted_request_ids - scheduled)
        for one in output.scheduled:
            tracked = self._tracked.get(one.request_id)
            if tracked is None:
                raise OrderError(
                    f"build_connector_meta schedules request {one.request_id}, and on_new_request was not"
                    " called for it, or request_finished was as well"
                )
            tracked.is_old &= one.num_computed_tokens > 0
            tracked.num_planned = one.num_computed_tokens + one.num_scheduled_tokens
        plan = {"step": output.step, "heard": self._heard, "loads": self._loads, "saves": self._saves}
        self._loads, self._saves = [], []
        return plan

    def update_connector_output(self, output: WorkerOutput) -> None:
        self._unsent -= output.finished_sending
        for request_id in output.finished_recving & self._tracked.keys():
            self._tracked[request_id].is_loading = False
        for save in self._saves:
            if not output.invalid_block_ids.isdisjoint(save["blocks"]):
                save["tokens"] = ()  # it ended before it was known that its KV is wrong
        for part in output.worker_metadata:
            assert isinstance(part, Mapping)
            self._heard = max(self._heard, part["step"])
            for request_id in part["failed"]:
                if request_id in self._tracked:
                    self._tracked[request_id].has_failed = True

    def has_pending_push_work(self) -> bool:
        return bool(self._unsent)

    # -- the whole -----------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        if not self._produces:
            return False  # what it loads is another engine's, which does not forget by being asked here
        Shelf.at(self._contact).clear()
        for tracked in self._tracked.values():
            tracked.is_old = True
        return True

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def shutdown(self) -> None:
        self._context.close()


class MemoryWorker(WorkerConnector):
    """Moves; see the module's drawing."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._context = context
        group = context.cache.groups[0]
        self._layout, self._layer_names = group.layout, group.layer_names
        self._contact = context.config.control_address()
        self._caches: tuple[Tensor, ...] = ()
        self._plan: Mapping[str, Any] = {}
        self._loading: list[Mapping[str, Any]] = []
        """In the background; begun in earlier steps."""
        self._saving: list[Mapping[str, Any]] = []
        self._begun: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] = ([], [])
        """Loads and saves of this step."""
        self._suspect: dict[int, int] = {}
        """Blocks that nothing is saved from, each with the step in which its load failed."""
        self._failed_blocks: set[int] = set()
        self._failed: list[str] = []
        self._shelf: Shelf | None = None
        if context.config.require_role().produces:
            self._shelf = Shelf(
                self._contact,
                engine_id=context.config.engine_id,
                form=form_of(context),
                max_bytes=context.config.buffer_size,
            )

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        missing = [name for name in self._layer_names if name not in kv_caches]
        if missing:
            raise LayoutError(f"register_kv_caches got no cache for {', '.join(missing)}")
        for name in self._layer_names:
            self._layout.check(kv_caches[name])
        self._caches = tuple(kv_caches[name] for name in self._layer_names)

    # -- one step ------------------------------------------------------------------------------

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        for load in [load for load in self._loading if load["request"] in request_ids]:
            self._loading.remove(load)
            self._begun[0].append({**load, "tokens": ()})  # named as received, but nothing is written

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, Mapping)
        self._plan = metadata
        heard = metadata["heard"]
        self._suspect = {block: step for block, step in self._suspect.items() if step > heard}
        for save in metadata["saves"]:
            is_spoilt = not self._suspect.keys().isdisjoint(save["blocks"])
            self._begun[1].append({**save, "tokens": ()} if is_spoilt else save)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._plan = {}

    def start_load_kv(self) -> None:
        loads = self._plan.get("loads", ())
        if loads and not self._caches:
            raise LayoutError("start_load_kv was called, and register_kv_caches was not: there is no cache")
        for load in loads:
            if load["in_background"]:
                self._begun[0].append(load)
            else:
                self._load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None  # start_load_kv has loaded every layer

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        return None  # saved is what has ended

    def wait_for_save(self) -> None:
        return None

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        loads, self._loading = self._loading, []
        saves, self._saving = self._saving, []
        for load in loads:
            self._load(load)
        for save in saves:
            self._save(save)
        (self._loading, self._saving), self._begun = self._begun, ([], [])
        return frozenset(save["request"] for save in saves), frozenset(load["request"] for load in loads)

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def build_worker_metadata(self) -> Plain:
        failed, self._failed = self._failed, []
        return {"step": self._plan["step"], "failed": failed} if failed else None

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def shutdown(self) -> None:
        if self._shelf is not None:
            self._shelf.close()
        self._context.close()

    # -- copies --------------------------------------------------------------------------------

    def _load(self, load: Mapping[str, Any]) -> None:
        """Copy an entry into a request's blocks. If anything is wrong with it, its blocks are reported."""
        began, nbytes = time.perf_counter(), 0
        start, end = load["start"], len(load["tokens"])
        try:
            if not load["tokens"]:
                raise ClosedError("its request was preempted")
            entry = Shelf.at(self._contact).find(load["extra"], tuple(load["tokens"]))
            self._verify(entry)
            for cache, (key, value) in zip(self._caches, entry.layers, strict=True):
                part = key[start:end], None if value is None else value[start:end]
                scatter(cache, self._layout, load["blocks"], start, *part)
                nbytes += part[0].nbytes + (0 if part[1] is None else part[1].nbytes)
        except KvplugError as e:
            self._fail(load, e)
        else:
            took = time.perf_counter() - began
            self._context.stats.record("load", nbytes, took, tokens=end - start)

    def _fail(self, load: Mapping[str, Any], error: KvplugError) -> None:
        self._context.stats.fail("load", reason_of(error))
        blocks = load["blocks"][load["start"] // self._layout.block_size :]
        self._failed_blocks.update(blocks)
        self._suspect |= dict.fromkeys(blocks, self._plan["step"])
        self._failed.append(load["request"])

    def _save(self, save: Mapping[str, Any]) -> None:
        """Copy the blocks of a request that has ended. It is named afterwards, and its blocks are free."""
        shelf, tokens = self._shelf, tuple(save["tokens"])
        assert shelf is not None
        is_stored = False
        if tokens and save["era"] == shelf.era:
            began = time.perf_counter()
            entry = self._entry((save["extra"], tokens), save["blocks"])
            try:
                shelf.put(entry, save["era"])
            except EntryGoneError:
                pass  # forgotten, as was wanted
            except TimeoutError:
                self._context.stats.fail("save", Reason.NO_ROOM)
            except KvplugError as e:
                self._context.stats.fail("save", reason_of(e))
            else:
                is_stored = True
                took = time.perf_counter() - began
                self._context.stats.record("save", entry.nbytes, took, tokens=len(tokens))
        shelf.settle(save["lease"], is_stored=is_stored)

    def _entry(self, key: tuple[bytes, tuple[int, ...]], blocks: tuple[int, ...]) -> Entry:
        layers = tuple(gather(cache, self._layout, blocks, 0, len(key[1])) for cache in self._caches)
        return Entry(key=key, layers=layers, digests=self._digests(layers))

    def _digests(self, layers: tuple[tuple[Tensor, Tensor | None], ...]) -> tuple[bytes, ...]:
        if not self._context.checksums:
            return ()
        name = self._context.checksums[0]
        return tuple(
            digest(name, *(memory_of(part) for part in layer if part is not None)) for layer in layers
        )

    def _verify(self, entry: Entry) -> None:
        if entry.digests and self._digests(entry.layers) not in (entry.digests, ()):
            raise IntegrityError("the entry does not hash to what its producer stated: it is not used")
