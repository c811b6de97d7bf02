"""Computes the steps that the scheduler plans; the side of the engine that calls a WorkerConnector."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from kvplug.engine import CacheEvent, KVCacheConfig, PeerLink, Plain, WorkerConnector, WorkerOutput
from kvplug_transformers.engine.attention import ForwardPass, PagedCache, under_way
from kvplug_transformers.engine.batch import Batch
from kvplug_transformers.engine.pages import Pages
from kvplug_transformers.engine.step import Step
from kvplug_transformers.model.facts import cache_argument


class Worker:
    """One model, its pages, and one forward pass a step, with every request's tokens packed into it.

    The calls to the connector are those of ``WorkerConnector``'s docstring, in that order; the two that
    belong inside the attention layers are in ``PagedCache.update``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCacheConfig,
        connector: WorkerConnector | None = None,
        *,
        samples: bool = True,
    ) -> None:
        """``samples``: whether to sample tokens. Of several workers that share a model, one does."""
        self._model = model.eval()
        self._samples = samples
        self._connector = connector
        self._takes_positions_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self._events: list[CacheEvent] = []
        parameter = next(model.parameters())
        self.pages = Pages(cache, parameter.dtype, parameter.device)
        if connector is not None:
            connector.register_kv_caches(self.pages.by_layer)

    def get_handshake_metadata(self) -> Mapping[int, Plain]:
        """The connector's handshake metadata, by rank; empty if it has none."""
        metadata = None if self._connector is None else self._connector.get_handshake_metadata()
        return {} if metadata is None else {0: metadata}

    @property
    def contacts(self) -> tuple[str, ...]:
        """The addresses of its connector, for peers."""
        return contacts_of(self._connector)

    @property
    def last_route(self) -> str:
        """A description of the source of the connector's last load; empty if the connector has none."""
        return getattr(self._connector, "last_route", "")

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the connector's peers are connected.

        Returns:
            The agreed ``"transport"``, and the ``"reasons"`` for or against each candidate.
        """
        if self._connector is None:
            return _choice(None, "")
        self._connector.wait_until_ready()
        return _choice(getattr(self._connector, "link", None), self.pages.tensor.device.type)

    def execute(self, step: Step) -> tuple[dict[str, int], WorkerOutput]:
        """Run one step; returns the sampled tokens by request, and the connector's report."""
        connector = self._connector
        if connector is None:
            return self._forward(step), WorkerOutput()
        if step.output.preempted_request_ids:
            connector.handle_preemptions(step.output.preempted_request_ids)
        connector.bind_connector_metadata(step.metadata)
        try:
            connector.start_load_kv()
            sampled = self._forward(step)
            connector.wait_for_save()
            sent, received = connector.get_finished(step.output.finished_request_ids)
            invalid = connector.get_block_ids_with_load_errors()
            stats = connector.get_stats()
            self._events += connector.take_events()
            metadata = connector.build_worker_metadata()
        finally:
            connector.clear_connector_metadata()
        return sampled, WorkerOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=invalid,
            worker_metadata=() if metadata is None else (metadata,),
            stats=stats,
        )

    def take_events(self) -> list[CacheEvent]:
        """Cache events of the worker side since the last call."""
        events, self._events = self._events, []
        return events

    def _forward(self, step: Step) -> dict[str, int]:
        """One pass over all scheduled tokens. Greedy: the most likely token of each finished prefix."""
        if not step.output.scheduled:
            return {}
        device = self.pages.tensor.device
        ids = [token for tokens in step.token_ids for token in tokens]
        batch = Batch.of(step, self.pages.block_size)
        last, end = {}, -1
        for one, samples in zip(step.output.scheduled, step.samples, strict=True):
            end += one.num_scheduled_tokens
            if samples and self._samples:
                last[one.request_id] = end
        keep = torch.tensor(list(last.values()), dtype=torch.int64, device=device)
        this = ForwardPass.over(self.pages, batch)
        # Not inference_mode: a connector's other threads could not write to tensors that save_kv_layer makes
        # in that mode.
        with torch.no_grad(), under_way(self._model, this):
            logits = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([batch.positions], device=device),
                use_cache=True,
                **{self._cache_argument: PagedCache(this, self._connector)},
                **({"logits_to_keep": keep} if self._takes_positions_to_keep else {}),
            ).logits[0]
        chosen = (logits if self._takes_positions_to_keep else logits[keep]).argmax(-1).tolist()
        return dict(zip(last, chosen, strict=True))


def contacts_of(connector: object) -> tuple[str, ...]:
    """The addresses of a connector's worker side, for peers; empty if it serves none."""
    contact = getattr(connector, "contact", "")
    return (contact,) if contact else ()


def _choice(link: PeerLink | None, device: str) -> dict[str, Any]:
    if link is None:
        return {"transport": "", "reasons": []}
    agreement = link.agreement
    # If the two ends have different kinds of device, KV uses the transport of CPU tensors.
    agreed = agreement.transports
    selection = agreed.get(device) or agreed["cpu"]
    reasons = [f"{candidate.name}: {candidate.reason}" for candidate in selection.candidates]
    reasons.append(f"integrity: {agreement.checksum or 'off'}")
    return {"transport": selection.chosen, "reasons": [*reasons, *agreement.converts]}
