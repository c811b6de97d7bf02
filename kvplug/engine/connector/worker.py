"""The worker side of a connector: it moves KV."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvplug.engine.connector.values import (
    CacheEvent,
    Plain,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout

if TYPE_CHECKING:
    from torch import Tensor


class WorkerConnector(abc.ABC):
    """Moves KV between this worker's paged cache and places outside the engine.

    Law. As for the scheduler side. A block whose load failed, for whatever reason, is named by
    ``get_block_ids_with_load_errors`` no later than in the step in which its request is reported.

    Callers. The engine's worker, from the thread that runs the model. At start: ``register_kv_caches`` and
    ``get_handshake_metadata``. Each step: ``handle_preemptions``, if requests were preempted;
    ``bind_connector_metadata``; ``start_load_kv``; ``wait_for_layer_load`` and ``save_kv_layer`` inside each
    attention layer in the cache config, unless ``has_connector_metadata`` returns false;
    ``wait_for_save``; ``get_finished``; ``get_block_ids_with_load_errors``; ``get_stats``; ``take_events``;
    ``build_worker_metadata``; ``clear_connector_metadata``. At the end: ``shutdown``.

    Two calls of a step may come later than listed. ``start_load_kv`` must come before the forward pass only
    if a request of this step needs its loads. If all loads are in the background, it may come after the
    forward pass, or in a step without one. So it only begins loads; everything else that a step needs begins
    in ``bind_connector_metadata``. ``wait_for_save`` comes after ``build_worker_metadata`` in an engine that
    drafts (speculative decoding), since the draft model's layers run then. So the loads that the step needs
    have ended when the first of ``wait_for_save``, ``get_finished`` and ``get_block_ids_with_load_errors``
    returns. ``clear_connector_metadata`` is always the last call.

    A failed transfer makes no call raise: it is reported as a load error, or counted as a failed save. No
    call waits for a load in the background, whatever its peer does. If a failed load or a save may still use
    blocks that a step writes into, the step waits for it, and raises :class:`~kvplug.engine.StalledError` if
    that takes too long.
    """

    def __init__(self) -> None:
        self._metadata: Plain = None

    # -- at start ------------------------------------------------------------------------------

    @abc.abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Receive the paged cache: a tensor for each layer name, laid out as in the cache config's groups.

        Raises:
            LayoutError, ConfigError: the tensors do not match the cache config.
        """

    def get_handshake_metadata(self) -> Plain:
        """Return the data that scheduler sides of this and other engines need to reach this worker."""
        return None

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Return once every peer that the config names is connected and its handshake has succeeded.

        Raises:
            TimeoutError, HandshakeError, AuthenticationError: as for the scheduler side.
        """
        return None

    # -- each step -----------------------------------------------------------------------------

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        """Stop all reads and writes of the blocks of these requests now, before they are overwritten."""
        return None

    def bind_connector_metadata(self, metadata: Plain) -> None:
        """Begin a step with the metadata from the scheduler side's ``build_connector_meta``."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        """End the step."""
        self._metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether this step needs ``wait_for_layer_load`` and ``save_kv_layer``.

        The engine calls this in each layer, and skips both calls if the result is false. It is false outside
        of a step, and in a step whose layers wait for no load and are not saved one by one. The default
        implementation returns whether the step's metadata is bound.
        """
        return self._metadata is not None

    @abc.abstractmethod
    def start_load_kv(self) -> None:
        """Begin this step's loads, and nothing else.

        Does not wait for the loads or the device. A load writes into its blocks after all work that the
        caller has queued on the device so far, which may include a forward pass.
        """

    @abc.abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when this layer's KV is in the cache, or when its load has failed and been noted.

        A load without progress for some time, much less than ``timeout_s``, counts as failed, since other
        requests of the step wait too.
        """

    @abc.abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        """Begin to save what this step must save of this layer. The step's KV is in the cache now."""

    @abc.abstractmethod
    def wait_for_save(self) -> None:
        """Return when the caller, or the work it queues next, may overwrite the step's blocks.

        A request's whole blocks do not change while it runs, so the connector may read them until the request
        is preempted or ``get_finished`` names it. This excludes layers with a window, whose blocks are freed
        earlier.
        """

    @abc.abstractmethod
    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return ``(sent, received)``: requests whose asynchronous transfer ended since the last call.

        Names only requests whose blocks ``request_finished`` kept, or that were loaded asynchronously, each
        once. A request that ended while its load was under way is named as received when the load has ended,
        which frees its blocks. It is not named as sent too, even if ``request_finished`` kept the blocks.
        """

    @abc.abstractmethod
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Return the blocks whose load failed since the last call."""

    def get_stats(self) -> Mapping[str, Any] | None:
        """Return the TransferStats since the last call, or ``None`` if nothing was counted."""
        return None

    def get_status(self) -> Mapping[str, Plain]:
        """Return what this side does now; see :meth:`SchedulerConnector.get_status`."""
        return {}

    def take_events(self) -> Iterable[CacheEvent]:
        """Return cache events that only the worker sees."""
        return ()

    def build_worker_metadata(self) -> Plain:
        """Return this worker's message to the scheduler side after this step, or ``None``.

        The scheduler side receives the messages of all workers in ``WorkerOutput.worker_metadata``.
        """
        return None

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Stop all work and free everything. Idempotent; bounded in time. A killed engine never calls it."""
