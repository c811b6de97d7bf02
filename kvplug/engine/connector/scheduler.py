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
    """Decides which tokens' KV is loaded from outside, and which KV is stored there. Never touches a tensor.

    Law. Only tokens whose KV can really be loaded are promised. Wrong KV is never used: the worker side
    reports failed loads in the same step, and the engine recomputes them or fails the request. Blocks that a
    transfer uses are not reused before ``get_finished`` names the request.

    Callers. The engine's scheduler, from one thread, in this order. Once at start:
    ``set_xfer_handshake_metadata``. For each request: ``on_new_request``, then ``get_num_new_matched_tokens``
    (any number of times), ``update_state_after_alloc`` (once; again when an asynchronous load has ended), and
    at its end ``request_finished``, once. For each step: ``build_connector_meta``, and after the step
    ``update_connector_output`` and ``take_events``. Between steps: ``has_pending_push_work``, if no request
    is left, and ``reset_cache``. At the end: ``shutdown``.

    An engine may have several steps in flight: ``build_connector_meta`` of step n+1, and
    ``request_finished`` of a request that step n computes, may then come before
    ``update_connector_output`` of step n. So step n+1 may still build on a load that failed in step n. The
    engine discards what step n+1 computed, and the connector must not keep it either. Worker sides run the
    steps in the order in which they were built, and ``update_connector_output`` follows the same order.

    An engine may make a request wait for any load, even one that its step needs. That step does not schedule
    the request. After the load has ended, ``update_state_after_alloc`` is called again, with 0 tokens.

    Not promised. The matched KV may be gone when the worker side loads it; the load then fails.
    """

    supports_hma: ClassVar[bool] = False
    """Whether it serves caches with several KV cache groups, and groups with a window (hybrid memory).

    If true, the connector accepts block tables with ``NO_BLOCK``. If false, engines with such caches refuse
    the connector.
    """

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether KV that is handed off at the end of a request must arrive. Constant for a connector.

        If true, the engine recomputes a request that it preempted while its hand-off was pending, instead of
        finishing it without its blocks. If false, a lost save is only a later miss.
        """
        return False

    @classmethod
    def get_required_kvcache_layout(cls, config: Config, options: Any) -> str | None:
        """Return the axis string that this connector requires under this config, or ``None`` for any.

        Called before anything is built. A connector composed of others calls theirs.
        """
        return None

    @classmethod
    def needs_layer_hooks(cls, config: Config, options: Any) -> bool:
        """Whether this config requires calls of ``wait_for_layer_load`` and ``save_kv_layer`` in each layer
        of each step.

        Only if this is false may an engine replay captured whole steps (full CUDA graphs), with no call
        between layers. The connector then loads in the background only, and saves a step's KV in
        ``wait_for_save``, when it is complete. Called before anything is built.
        """
        return True

    @classmethod
    def build_prom_metrics(
        cls,
        label_names: Sequence[str],
        label_values: Mapping[int, Sequence[str]],
        counter: Callable[..., Any] | None = None,
        histogram: Callable[..., Any] | None = None,
    ) -> Mapping[int, Sink]:
        """Return Prometheus metrics of this connector: one sink for each engine (by index), with its labels.

        The default exports every figure of TransferStats. ``counter`` makes a counter from its name, text and
        labels, and ``histogram`` a histogram, with ``buckets=`` also. They are the engine's own classes if
        those wrap Prometheus, or ``functools.partial(Counter, registry=...)``; ``None`` for both means those
        of ``prometheus_client``, in the global registry.
        """
        from kvplug.metrics.prometheus import prometheus_sinks

        return prometheus_sinks(label_names, label_values, counter, histogram)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Plain]) -> None:
        """Receive the results of the workers' ``get_handshake_metadata``, by rank. May be empty."""
        return None

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Return once every peer that the config names is connected and its handshake has succeeded.

        Optional: an engine calls it to fail at start instead of recomputing later.

        Raises:
            TimeoutError: a peer did not connect; the message names the peer and its address.
            HandshakeError, AuthenticationError: the two ends cannot work together; the message says why.
        """
        return None

    def on_new_request(self, request: Request) -> None:
        """Note that a request has arrived. Nothing is decided yet."""
        return None

    @abc.abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``num_computed_tokens`` can be loaded now, and whether in the
        background.

        Returns ``(n, is_async)``. ``n`` is ``None`` if the caller must ask again later. If ``n`` is 0,
        ``is_async`` is false. Counts only the longest prefix that can really be loaded. Has no side effects,
        and may be called often.
        """

    @abc.abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Note the allocated blocks, into which ``num_external_tokens`` tokens (may be 0) will be loaded."""

    @abc.abstractmethod
    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        """Return this step's tasks for the workers. Resets the step's state; does not change ``output``."""

    def update_connector_output(self, output: WorkerOutput) -> None:
        """Receive the worker sides' reports after the step."""
        return None

    @abc.abstractmethod
    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that the request has ended. Called once.

        Returns ``(keeps_blocks, kv_transfer_params)``. With ``keeps_blocks`` the engine frees the blocks only
        when ``get_finished`` has named the request as sent or received. A request is named once: if it was
        aborted while it was loading in the background, it is named as received only.
        """

    def get_hit_sources(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        """Return the sources of the tokens that ``update_state_after_alloc`` was just called for.

        Returns:
            How many of the ``num_external_tokens`` come from each source: ``"host"`` (memory of this host),
            ``"disk"``, ``"peer"`` (another engine) or ``"other"``.
        """
        return {"other": num_external_tokens} if num_external_tokens else {}

    def has_pending_push_work(self) -> bool:
        """Whether unfinished work needs more steps to progress or be reported, though no request is active.

        The engine runs further steps while this is true.
        """
        return False

    def take_events(self) -> Iterable[CacheEvent]:
        """Return the events since the last call."""
        return ()

    def reset_cache(self) -> bool:
        """Invalidate the KV that is cached outside, so that no later request loads KV that was computed
        before this call. Returns ``False`` if this side cannot do that.

        An engine calls it when its KV becomes invalid, such as when the model's weights change. The engine
        clears its own cache too, since a connector cannot distinguish older blocks from newer ones. Does not
        wait. If workers must be informed, the next step informs them; until then
        :meth:`has_pending_push_work` is true, and other engines may load old KV from this one.
        """
        return False

    def get_stats(self) -> Mapping[str, Any] | None:
        """Return this side's TransferStats since the last call, or ``None`` if nothing was counted."""
        return None

    def get_status(self) -> Mapping[str, Plain]:
        """Return what this side does now, for people who watch the engine (``kvplug top``).

        Any thread calls it, at any time. Never waits, and takes no lock for long. These keys have a meaning
        to ``kvplug top``; a side leaves out those it has no use for:

        - ``loads``: those in flight, each a mapping with ``request_id``, ``source`` and the age in
          ``seconds``;
        - ``num_held``: requests that have ended and whose blocks are kept.

        kvplug adds ``waiting``: the requests that were answered "ask again later", with ``request_id`` and
        ``seconds``.
        """
        return {}

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Stop all work and free everything. Idempotent; bounded in time. A killed engine never calls it."""
