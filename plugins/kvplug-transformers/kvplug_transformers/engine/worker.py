"""Computes the steps that the scheduler plans; the side of the engine that calls a WorkerConnector."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from kvplug import Config, build_connector
from kvplug.engine import CacheEvent, Parallelism, PeerLink, Plain, WorkerConnector, WorkerOutput
from kvplug_transformers.engine.attention import ForwardPass, PagedCache, under_way
from kvplug_transformers.engine.options import EngineOptions, cache_config
from kvplug_transformers.engine.pages import Pages
from kvplug_transformers.engine.step import Step
from kvplug_transformers.model.facts import ModelFacts, cache_argument


class Worker:
    """One model, its pages, and one forward pass a step, with every request's tokens packed into it.

    The calls to the connector are those of ``WorkerConnector``'s docstring, in that order; the two that
    belong inside the attention layers are in ``PagedCache.update``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        options: EngineOptions,
        connector: WorkerConnector | None = None,
        *,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """``rank``, ``size``: of the workers that share the model. Rank 0 samples tokens."""
        self.facts = facts
        self._model = model.eval()
        self._samples = rank == 0
        self._connector = connector
        self._takes_positions_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        parameter = next(model.parameters())
        self.pages = Pages(cache_config(facts, options, size), parameter.dtype, parameter.device)
        contact = getattr(connector, "contact", "")
        self.contacts = (contact,) if contact else ()
        """The address of its connector, for peers; empty if it serves none."""
        self.handshake_metadata: dict[int, Plain] = {}
        """The connector's handshake metadata, by rank; empty if it has none."""
        if connector is not None:
            connector.register_kv_caches(self.pages.by_layer)
            if (metadata := connector.get_handshake_metadata()) is not None:
                self.handshake_metadata[0] = metadata

    @classmethod
    def connected(
        cls,
        model: PreTrainedModel,
        facts: ModelFacts,
        options: EngineOptions,
        config: Config,
        *,
        rank: int = 0,
        size: int = 1,
        **given: Any,
    ) -> Worker:
        """A worker with its side of the config's connector. ``given``: more for ``build_connector``."""
        connector: Any = build_connector(
            config,
            "worker",
            model=facts.info,
            cache=cache_config(facts, options, size),
            parallelism=Parallelism(worker_rank=rank, num_workers=size, tensor_rank=rank, tensor_size=size),
            **given,
        )
        return cls(model, facts, options, connector, rank=rank, size=size)

    @property
    def last_route(self) -> str:
        """A description of the source of the connector's last load; empty if the connector has none."""
        return getattr(self._connector, "last_route", "")

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the connector's peers are connected.

        Returns:
            The agreed ``"transport"``, and the ``"reasons"`` for or against each candidate.
        """
        if self._connector is not None:
            self._connector.wait_until_ready()
        link: PeerLink | None = getattr(self._connector, "link", None)
        if link is None:
            return {"transport": "", "reasons": []}
        agreement = link.agreement
        # If the two ends have different kinds of device, KV uses the transport of CPU tensors.
        agreed = agreement.transports
        selection = agreed.get(self.pages.tensor.device.type) or agreed["cpu"]
        reasons = [f"{candidate.name}: {candidate.reason}" for candidate in selection.candidates]
        reasons.append(f"integrity: {agreement.checksum or 'off'}")
        return {"transport": selection.chosen, "reasons": [*reasons, *agreement.converts]}

    def execute(self, step: Step) -> tuple[dict[str, int], WorkerOutput, Iterable[CacheEvent]]:
        """Run one step; returns the sampled tokens by request, the connector's report, and its events."""
        connector = self._connector
        if connector is None:
            return self._forward(step), WorkerOutput(), ()
        if step.preempted_request_ids:
            connector.handle_preemptions(step.preempted_request_ids)
        connector.bind_connector_metadata(step.metadata)
        try:
            connector.start_load_kv()
            sampled = self._forward(step)
            connector.wait_for_save()
            sent, received = connector.get_finished(step.finished_request_ids)
            invalid = connector.get_block_ids_with_load_errors()
            stats = connector.get_stats()
            events = connector.take_events()
            metadata = connector.build_worker_metadata()
        finally:
            connector.clear_connector_metadata()
        output = WorkerOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=invalid,
            worker_metadata=() if metadata is None else (metadata,),
            stats=stats,
        )
        return sampled, output, events

    def _forward(self, step: Step) -> dict[str, int]:
        """One pass over all scheduled tokens. Greedy: the most likely token of each finished prefix."""
        if not step.scheduled:
            return {}
        device = self.pages.tensor.device
        ids = [token for tokens in step.token_ids for token in tokens]
        last, end = {}, -1
        for one, samples in zip(step.scheduled, step.samples, strict=True):
            end += one.num_scheduled_tokens
            if samples and self._samples:
                last[one.request_id] = end
        keep = torch.tensor(list(last.values()), dtype=torch.int64, device=device)
        this = ForwardPass.over(self.pages, step)
        # Not inference_mode: a connector's other threads could not write to tensors that save_kv_layer makes
        # in that mode.
        with torch.no_grad(), under_way(self._model, this):
            logits = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([this.positions], device=device),
                use_cache=True,
                **{self._cache_argument: PagedCache(this, self._connector)},
                **({"logits_to_keep": keep} if self._takes_positions_to_keep else {}),
            ).logits[0]
        chosen = (logits if self._takes_positions_to_keep else logits[keep]).argmax(-1).tolist()
        return dict(zip(last, chosen, strict=True))

    def shutdown(self) -> None:
        """Shut its side of the connector down. Idempotent."""
        if self._connector is not None:
            self._connector.shutdown()
