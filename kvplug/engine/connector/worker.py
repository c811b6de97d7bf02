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
    """Moves KV between this worker's paged cache and elsewhere.

    Law. As for the scheduler side. A block whose load failed, for whatever reason, is named by
    ``get_block_ids_with_load_errors`` no later than in the step in which its request is reported.

    Callers. The engine's worker, from the thread that runs the model. At start ``register_kv_caches`` and
    ``get_handshake_metadata``. Each step: ``handle_preemptions`` when there are any;
    ``bind_connector_metadata``; ``start_load_kv``; inside each attention layer that the cache config
    names ``wait_for_layer_load`` and ``save_kv_layer``, unless ``has_connector_metadata`` is false;
    ``wait_for_save``; ``get_finished``; ``get_block_ids_with_load_errors``; ``get_stats``; ``take_events``;
    ``build_worker_metadata``; ``clear_connector_metadata``. At the end ``shutdown``.

    Two calls of a step may come later, each for itself. ``start_load_kv`` comes before the forward pass
    only where a request of this step needs its loads; otherwise, all of them being in the background, it
    may come after it, or in a step without one. So nothing but loads begins there; whatever else a step
    needs begins in ``bind_connector_metadata``. ``wait_for_save`` comes after ``build_worker_metadata`` in
    an engine that drafts (speculative decoding), since its draft model's layers do. So the loads that the
    step needs have ended by whichever comes first of ``wait_for_save``, ``get_finished`` and
    ``get_block_ids_with_load_errors``. ``clear_connector_metadata`` is the last call in either case.

    None of these raises because a transfer failed: that is a load error or a counted save failure. None of
    them waits for a load in the background, whatever its peer does. Blocks that a failed load or a save may
    still use hold up the step that writes into them, and raise :class:`~kvplug.engine.StalledError` where
    that does not end.
    """

    def __init__(self) -> None:
        self._metadata: Plain = None

    # -- at start ------------------------------------------------------------------------------

    @abc.abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """The paged cache: layer name to tensor, laid out as the cache config's groups state.

        Raises:
            LayoutError, ConfigError: the tensors are not what the cache config promised.
        """

    def get_handshake_metadata(self) -> Plain:
        """The data that scheduler sides of this and other engines need to reach this worker."""
        return None

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Return once every peer that the config names is connected and agreed with.

        Raises:
            TimeoutError, HandshakeError, AuthenticationError: as at the scheduler side.
        """
        return None

    # -- each step -----------------------------------------------------------------------------

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        """The blocks of these requests will be overwritten: stop all reads and writes of them now."""
        return None

    def bind_connector_metadata(self, metadata: Plain) -> None:
        """What ``build_connector_meta`` of the scheduler side returned for this step."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether this step needs ``wait_for_layer_load`` and ``save_kv_layer``.

        The engine asks in each layer, and leaves both out otherwise. ``False`` outside of a step, and in a
        step that loads nothing in front of its layers and saves nothing by layer. The default: whether the
        step's metadata is bound.
        """
        return self._metadata is not None

    @abc.abstractmethod
    def start_load_kv(self) -> None:
        """Begin this step's loads, and nothing else.

        Does not wait for them, nor for the device: a load writes into its blocks after all work that the
        caller has queued on the device so far, which may include a forward pass.
        """

    @abc.abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when this layer's KV is in the cache, or its load has failed and been noted.

        A load without progress for some time, much less than ``timeout_s``, has failed: other
        requests of the step wait as well.
        """

    @abc.abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        """This layer's KV of the step's tokens is in the cache. Begin to save what must be saved."""

    @abc.abstractmethod
    def wait_for_save(self) -> None:
        """Return when the step's blocks may be overwritten, by the caller or by what it queues next.

        Whole blocks of a request, which do not change while it runs, may be read until it is preempted or
        ``get_finished`` names it; not in layers with a window, whose blocks are freed earlier.
        """

    @abc.abstractmethod
    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Requests whose asynchronous (sending, receiving) ended since the last call.

        Only requests that were kept by ``request_finished``, or loaded asynchronously, are named; each
        once. One that ended while its load was under way is named as received when the load has ended,
        and that frees its blocks: it is not named as sent as well, even where ``request_finished`` kept
        them.
        """

    @abc.abstractmethod
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Blocks whose load failed since the last call."""

    def get_stats(self) -> Mapping[str, Any] | None:
        """Snapshot of TransferStats since the last call; ``None`` if nothing was counted."""
        return None

    def take_events(self) -> Iterable[CacheEvent]:
        """Cache events that only the worker sees."""
        return ()

    def build_worker_metadata(self) -> Plain:
        """This worker's message to the scheduler side after this step; ``None`` for none.

        The scheduler side receives the messages of all workers in ``WorkerOutput.worker_metadata``.
        """
        return None

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End everything. Idempotent, bounded in time. An engine that is killed never calls it."""
