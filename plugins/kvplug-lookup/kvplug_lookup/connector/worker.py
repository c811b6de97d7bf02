"""The worker side of the connector "lookup"."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplug import ClosedError, HandshakeError, TimeoutError
from kvplug.engine import ConnectorContext, KVLayout, LayoutError, PeerLink, Plain, Role, WorkerConnector
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, LookupBuffer, LookupStore, Pipe, Timeout
from kvplug_lookup.connector.device import Mark
from kvplug_lookup.connector.load import Load, Loader
from kvplug_lookup.connector.plan import StepPlan
from kvplug_lookup.connector.save import Saver
from kvplug_lookup.connector.serve import Service

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class LookupWorker(WorkerConnector):
    """Saves prompts into a store in this process, or loads them from the peer engine's.

    As producer it holds the store and listens; as consumer it dials the worker of its own rank in the
    peer engine, when first needed and again after a loss; in the role "both" it does the former and
    loads from its own store.
    """

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._context = context
        self._layer_names = context.cache.groups[0].layer_names
        self._index_of = {name: index for index, name in enumerate(self._layer_names)}
        self._layout: KVLayout = context.cache.groups[0].layout
        self._caches: tuple[Tensor, ...] = ()
        self._plan = StepPlan()
        self._loads: dict[str, Load] = {}
        """Of this step, and in the background."""
        self._step = 0
        self._suspect: dict[int, int] = {}
        """Blocks that nothing is saved from, each with the step in which its load failed: plans of later
        steps may have been made before the scheduler side heard of that. With several workers, those of
        any load that its step needs: it may have failed at another worker."""
        self._doubts_loads = False
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._spoilt_saves: set[str] = set()
        self._timed_out = False
        self._is_refused = False
        """This worker and the peer's can never agree, which the two engines' other sides do not know."""
        self._deadline = Deadline.after(None)

        self._store: LookupStore | None = None
        self._saver: Saver | None = None
        self._service: Service | None = None
        self.contact = ""
        """Where consumers find this worker; empty for a consumer. May carry a token: do not log it."""
        self._reach_lock = threading.Lock()
        self._reach: LookupBuffer | None = None
        self._dialling = threading.Lock()
        """Held while somebody connects, which may take long; the other lock never is."""
        self._closed = False
        self.link: PeerLink | None = None
        """What was agreed on with the producer, once connected."""
        self._loader: Loader | None = None
        config, options = context.config, context.options
        self._endpoint = context.lookup_buffer()
        try:
            if config.role in (Role.PRODUCER, Role.BOTH):
                self._begin_to_serve()
            if config.role in (Role.CONSUMER, Role.BOTH):
                self._loader = Loader(
                    self._buffer, timeout_s=config.timeout_s, stall_timeout_s=options.stall_timeout_s
                )
        except BaseException:
            self.shutdown()
            raise

    def _begin_to_serve(self) -> None:
        context, options = self._context, self._context.options
        listener = context.peers.listen()
        self.contact = listener.contact
        self._store = self._endpoint.hold(as_cache=True)
        self._saver = Saver(
            self._store,
            self._layout,
            len(self._layer_names),
            checksum=context.checksums[0] if context.checksums else None,
            timeout_s=options.save_timeout_s,
            max_bytes=options.max_unsaved,
            store_bytes=context.config.buffer_size,
            stats=context.stats,
        )
        self._doubts_loads = context.parallelism.num_workers > 1
        self._service = Service(
            listener, self._store, device=context.config.device, settle=self._saver.settle
        )

    # -- at start and at the end ---------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        missing = [name for name in self._layer_names if name not in kv_caches]
        if missing:
            raise LayoutError(
                f"no cache was registered for {', '.join(missing)}, which the cache config names"
            )
        for name in self._layer_names:
            self._layout.check(kv_caches[name])
        self._caches = tuple(kv_caches[name] for name in self._layer_names)

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        if self._loader is not None:
            self._buffer(Deadline.after(timeout, self._context.config.connect_timeout_s), retry=True)

    def shutdown(self) -> None:
        # First what wakes everybody who waits, then whoever may need a moment to end.
        closing = ClosedError("the connector was shut down")
        for load in list(self._loads.values()):
            load.fail(closing)
        with self._reach_lock:
            self._closed = True
            reach, self._reach = self._reach, None
            link = self.link
        self._context.peers.close()
        if link is not None:
            link.close()
        if reach is not None:
            reach.close(timeout=1.0)
        if self._saver is not None:
            self._saver.stop()
        if self._service is not None:
            self._service.close()
        if self._store is not None:
            self._store.close(timeout=1.0)
        if self._saver is not None:
            self._saver.join()
        if self._loader is not None:
            self._loader.close()
        self._context.close()

    def _buffer(self, deadline: Deadline, *, retry: bool = False) -> LookupBuffer:
        """The buffer that loads come from: our own store, or one end of a pair of pipes to the peer's.

        A new pair where the last one is lost, so that a producer that came back costs no failed load.
        ``retry``: wait for a producer that is not up; one whose entries were promised must be.
        """
        if self._store is not None:
            return self._store
        remaining = deadline.remaining()
        if not self._dialling.acquire(
            timeout=-1 if remaining is None else min(remaining, threading.TIMEOUT_MAX)
        ):
            raise TimeoutError("the peer engine's worker was still being connected to when the time was over")
        try:
            with self._reach_lock:
                self._check_open()
                reach = self._reach
            if reach is not None and not reach.is_lost:
                return reach
            if reach is not None:
                self._lose(reach)
            reach, link = self._connect(deadline, retry=retry)
            with self._reach_lock:
                closed = self._closed
                if not closed:
                    self._reach, self.link = reach, link
            if closed:
                reach.abort()
                self._check_open()
            return reach
        finally:
            self._dialling.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the connector was shut down")

    def _connect(self, deadline: Deadline, *, retry: bool) -> tuple[LookupBuffer, PeerLink]:
        rank, device = self._context.parallelism.worker_rank, self._context.config.device
        peers, pipes = self._context.peers, list[Pipe]()
        try:
            link = peers.connect(rank, "entries", timeout=deadline.remaining(), retry=retry)
        except HandshakeError:
            self._is_refused = True
            raise
        try:
            with self._reach_lock:
                self.link = link  # so that a shutdown meanwhile can end the opening of the pipes
                self._check_open()
            pipes.append(link.open_pipe("signal", timeout=deadline.remaining()))
            pipes.append(link.open_pipe("data", device=device, timeout=deadline.remaining()))
            return self._endpoint.reach(*pipes), link
        except BaseException:
            for pipe in pipes:
                pipe.abort()
            raise
        finally:
            link.close()

    def _lose(self, reach: LookupBuffer) -> None:
        """The peer is gone, or the pipes cannot be trusted any more: dial again at the next load."""
        with self._reach_lock:
            if self._reach is reach:
                self._reach = None
        reach.abort()

    def _checksum(self) -> str | None:
        """The hash that was agreed on with whoever loads come from."""
        if self._store is not None:
            return self._context.checksums[0] if self._context.checksums else None
        return self.link.agreement.checksum if self.link is not None else None

    # -- each step -----------------------------------------------------------------------------

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if self._saver is not None:
            self._saver.forget(request_id)
        if request_id in self._loads:
            self._loads[request_id].fail(ClosedError(f"request {request_id} ended or was preempted"))

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, Mapping)
        self._plan = plan = StepPlan.from_plain(metadata)
        self._step = plan.step
        self._suspect = {block: step for block, step in self._suspect.items() if step > plan.heard}
        if plan.reset and self._saver is not None:
            self._saver.reset()
        for request_id in self._plan.forget:
            self._forget(request_id)
        if self._saver is not None and self._caches:
            cache = self._caches[0]
            self._saver.begin(self._plan.saves, cache.dtype, cache.device)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._plan = StepPlan()

    def start_load_kv(self) -> None:
        self._deadline = Deadline.after(self._context.config.timeout_s)
        if not self._plan.loads:
            return
        if not self._caches:
            raise LayoutError("there is no cache to load into: register_kv_caches was not called")
        # Whoever had the blocks before may still use them, in a forward pass that is only queued.
        free = Mark(self._caches[0])
        assert self._loader is not None
        for plan in self._plan.loads:
            load = Load(
                plan,
                self._layout,
                self._caches,
                free=free,
                stall=self._loader.stall,
                checksum=self._checksum,
                stats=self._context.stats,
            )
            self._loads[plan.request_id] = load
            if self._doubts_loads and not plan.in_background:
                self._suspect |= dict.fromkeys(load.block_ids, self._step)
            self._loader.submit(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for load in self._loads_in_step():
            load.wait_for_layer(self._index_of[layer_name], self._deadline)

    def _loads_in_step(self) -> list[Load]:
        return [load for load in self._loads.values() if not load.plan.in_background]

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        if self._saver is not None:
            self._saver.gather_layer(self._plan.saves, self._index_of[layer_name], kv_layer)

    def wait_for_save(self) -> None:
        self._settle_loads()
        if self._saver is not None:
            self._saver.end(self._plan.saves)

    def _settle_loads(self) -> None:
        """The loads that the step needed have ended, whichever call the engine makes first after it."""
        for load in self._loads_in_step():
            load.wait_for_layer(len(self._layer_names) - 1, self._deadline)
            self._end(load)
        if self._saver is not None:
            self._spoil_saves(self._saver)

    def _spoil_saves(self, saver: Saver) -> None:
        """Requests may share blocks: what was gathered from one that a failed load was to fill is wrong.

        So is what was computed from it, here and, since they share the model, at every other worker. The
        scheduler side plans these saves anew.
        """
        for plan in self._plan.saves if self._suspect else ():
            if not self._suspect.keys().isdisjoint(plan.block_ids) and saver.forget(plan.request_id):
                self._spoilt_saves.add(plan.request_id)

    def _end(self, load: Load) -> None:
        """A load has ended; if it failed, nothing of what it touched is used or saved."""
        request_id = load.plan.request_id
        del self._loads[request_id]
        if load.error is not None:
            num_tokens = load.plan.end - load.plan.start
            _log.warning(
                "%d tokens of request %s could not be loaded: %s", num_tokens, request_id, load.error
            )
            self._failed_blocks |= load.block_ids
            self._suspect |= dict.fromkeys(load.block_ids, self._step)
            self._failed_requests.add(request_id)
            self._timed_out |= isinstance(load.error, TimeoutError)
            if self._saver is not None:
                self._saver.forget(request_id)

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        self._settle_loads()
        received = [load for load in self._loads.values() if load.plan.in_background and load.has_ended()]
        for load in received:
            self._end(load)
        return frozenset(), frozenset(load.plan.request_id for load in received)

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        self._settle_loads()
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def build_worker_metadata(self) -> Plain:
        has_suspects = self._step in self._suspect.values()
        if not (self._failed_requests or self._spoilt_saves or has_suspects or self._plan.reset):
            return None
        failed, self._failed_requests = sorted(self._failed_requests), set()
        spoilt, self._spoilt_saves = sorted(self._spoilt_saves), set()
        timed_out, self._timed_out = self._timed_out, False
        is_refused, self._is_refused = self._is_refused, False
        return {
            "step": self._step,
            "failed_loads": failed,
            "spoilt_saves": spoilt,
            "timed_out": timed_out,
            "refused": is_refused,
            "reset": self._plan.reset,
        }

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()
