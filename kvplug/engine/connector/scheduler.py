"""The scheduler side of a connector: it decides what moves."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from kvplug.config.config import Config
from kvplug.engine.connector.values import (
    BlockIds,
    CacheEvent,
    Plain,
    Request,
    RequestEnd,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.metrics.sinks import Sink
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout


class SchedulerConnector(abc.ABC):
    """Decides for which tokens KV is loaded from outside, and which KV is stored there. It touches no tensor.

    Law. Only tokens whose KV can really be loaded are promised. Wrong KV is never used: the worker side
    reports failed loads in the same step, and the engine recomputes them or fails the request. Blocks that a
    transfer uses are not reused before ``get_finished`` names the request.

    Callers. The engine's scheduler, from one thread, in this order: once at start
    ``set_xfer_handshake_metadata``; for a request ``on_new_request``, then
    ``get_num_new_matched_tokens`` (any number of times), ``update_state_after_alloc`` (once; again
    when an asynchronous load has ended); once a step ``build_connector_meta``, and after the step
    ``update_connector_output`` and ``take_events``; at the end of a request ``request_finished``, once; at
    the end ``shutdown``. Between steps ``has_pending_push_work``, where no request is left, and
    ``reset_cache``.

    An engine may have several steps in flight: ``build_connector_meta`` of step n+1, and
    ``request_finished`` of a request that step n computes, may then come before
    ``update_connector_output`` of step n. So step n+1 may still build on a load that has failed in step
    n; the engine discards what it computed there, and the connector must not keep it either. Worker sides run
    the steps, and ``update_connector_output`` is called for them, in the order in which they were built.

    An engine may let a request wait for any load, also for one that its step needs: that step does not
    schedule the request, and when it is over ``update_state_after_alloc`` comes again, with 0 tokens.

    Not promised. That the matched KV still exists when the worker side loads it: if not, that is a load
    error.
    """

    supports_hma: ClassVar[bool] = False
    """It serves caches with several KV cache groups, and groups with a window (hybrid memory).

    It takes block tables with ``NO_BLOCK``. An engine whose cache is of that kind refuses another connector.
    """

    @property
    def requires_kv_delivery(self) -> bool:
        """KV that is handed off at the end of a request must arrive. The same for a connector's whole life.

        The engine then computes a request again that it preempted while its hand-off was still pending,
        instead of letting it finish without its blocks. False: best effort, a lost save is a later miss.
        """
        return False

    @classmethod
    def get_required_kvcache_layout(cls, config: Config, options: Any) -> str | None:
        """The axis string that this connector requires under this config; ``None`` if it accepts any.

        Called before anything is built. A connector composed of others asks them.
        """
        return None

    @classmethod
    def needs_layer_hooks(cls, config: Config, options: Any) -> bool:
        """Whether, under this config, ``wait_for_layer_load`` and ``save_kv_layer`` must be called in each
        layer of each step.

        An engine may replay whole steps that it has captured (full CUDA graphs), with no call between layers.
        It does so only if this is false. Then the connector loads in the background only, and saves a step's
        KV when it is complete, in ``wait_for_save``. Called before anything is built.
        """
        return True

    @classmethod
    def build_prom_metrics(
        cls,
        label_names: Sequence[str],
        label_values: Mapping[int, Sequence[str]],
        counter: Callable[..., Any] | None = None,
    ) -> Mapping[int, Sink]:
        """Prometheus metrics of this connector: one sink for each engine (by index), with its labels.

        The default exports every figure of TransferStats. ``counter`` makes a counter from its name, text and
        labels: the engine's own class, where it wraps Prometheus, or ``functools.partial(Counter,
        registry=...)``; ``None``: ``prometheus_client.Counter``, in the global registry.
        """
        from kvplug.metrics.prometheus import prometheus_sinks

        return prometheus_sinks(label_names, label_values, counter)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Plain]) -> None:
        """What each worker's ``get_handshake_metadata`` returned, by rank. May be empty."""
        return None

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Return once every peer that the config names is connected and agreed with.

        Optional: an engine calls it to fail at start instead of recomputing later.

        Raises:
            TimeoutError: a peer did not connect; the message names it and its address.
            HandshakeError, AuthenticationError: the two ends cannot work together, and why.
        """
        return None

    def on_new_request(self, request: Request) -> None:
        """A request has arrived. Nothing is decided yet."""
        return None

    @abc.abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond ``num_computed_tokens`` can be loaded now, and whether in the background.

        Returns ``(n, is_async)``. ``None`` for ``n`` means "not yet, ask again"; ``is_async`` is never
        true with 0. Counts only the longest prefix that can really be loaded. No side effects; may be called
        often.
        """

    @abc.abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Blocks are allocated; ``num_external_tokens`` of them will be loaded (0: none will)."""

    @abc.abstractmethod
    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        """The worker sides' tasks of this step. Resets the step's state; does not change ``output``."""

    def update_connector_output(self, output: WorkerOutput) -> None:
        """Receives the worker sides' reports after the step."""
        return None

    @abc.abstractmethod
    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Called once.

        Returns ``(keeps_blocks, kv_transfer_params)``. With ``keeps_blocks`` the engine frees the
        blocks only when ``get_finished`` has named the request as sent or received. It names it once:
        one that was aborted while it was still loading in the background is named as received, and not as
        sent as well.
        """

    def get_hit_sources(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        """Where the tokens come from that ``update_state_after_alloc`` was just called for.

        Returns:
            How many of the ``num_external_tokens`` come from each source: ``"host"`` (memory of this host),
            ``"disk"``, ``"peer"`` (another engine) or ``"other"``.
        """
        return {"other": num_external_tokens} if num_external_tokens else {}

    def has_pending_push_work(self) -> bool:
        """Whether work is under way that only further steps can drive or report, though no request is active.

        The engine runs further steps while it is true.
        """
        return False

    def take_events(self) -> Iterable[CacheEvent]:
        """Events since the last call."""
        return ()

    def reset_cache(self) -> bool:
        """Invalidate the KV that is cached outside, so that no later request loads KV that was computed
        before this call. Returns ``False`` if this side cannot do that.

        An engine calls it when its KV becomes invalid, for example when the model's weights change, and
        clears its own cache too: a connector cannot distinguish its older blocks from newer ones. Does not
        wait. If workers must be informed, the next step does that, and :meth:`has_pending_push_work` is true
        until then; until that step has run, other engines may load old KV from this one.
        """
        return False

    def get_stats(self) -> Mapping[str, Any] | None:
        """Snapshot of this side's TransferStats since the last call; ``None`` if nothing was counted."""
        return None

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End everything. Idempotent, bounded in time. An engine that is killed never calls it."""
