"""The engine: one loop around the scheduler and the worker."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence as ManyOf
from typing import Any

from transformers import PreTrainedModel

from kvplug import TimeoutError
from kvplug.engine import CacheEvent, SchedulerConnector, TransferStats, WorkerConnector
from kvplug.transport import Deadline
from kvplug_transformers.engine.options import EngineOptions, cache_config
from kvplug_transformers.engine.scheduler import Scheduler
from kvplug_transformers.engine.sequence import Sequence, Token
from kvplug_transformers.engine.worker import Worker
from kvplug_transformers.engine.workers import ShardedWorker
from kvplug_transformers.model.facts import ModelFacts, describe

_PAUSE_S = 0.001
"""The pause after a step that had nothing to compute, while a load is under way in the background."""
_MOST_EVENTS = 10_000
"""How many cache events are kept until ``take_events``; the oldest are dropped."""


class Engine:
    """A scheduler side and a worker side in one process, driven by one thread.

    Both connector sides or neither are given; build them with ``facts.info`` as the model and
    ``cache_config(facts, options)`` as the cache. Decoding is greedy.

    Instead of a model it accepts the result of ``Workers.open``: then processes that share a model compute.
    With ``connects`` each of them has its worker side, so that only the scheduler side is given.

    Example::

        engine = Engine(model)
        sequence = engine.add(prompt_token_ids, max_new_tokens=32)
        for token in engine.run():
            print(token.token_id)
    """

    def __init__(
        self,
        model: PreTrainedModel | ShardedWorker,
        options: EngineOptions | None = None,
        *,
        facts: ModelFacts | None = None,
        scheduler_connector: SchedulerConnector | None = None,
        worker_connector: WorkerConnector | None = None,
    ) -> None:
        """Allocates the pages and passes the worker side's handshake metadata to the scheduler side.

        Raises:
            UnsupportedError: the model's cache is not keys and values per layer; the message has the reason.
            ValueError: one side of a connector was given without the other.
        """
        has_worker_side = model.connects if isinstance(model, ShardedWorker) else worker_connector is not None
        if (scheduler_connector is not None) != has_worker_side:
            raise ValueError("give both sides of a connector, or neither")
        self.options = options or EngineOptions()
        self.scheduler = Scheduler(self.options, scheduler_connector)
        self.worker: Worker | ShardedWorker
        if isinstance(model, ShardedWorker):
            self.facts, self.worker = model.facts, model
        else:
            self.facts = facts or describe(model)
            self.worker = Worker(model, cache_config(self.facts, self.options), worker_connector)
        self._connectors = (scheduler_connector, worker_connector)
        self._ids = itertools.count()
        self._events: deque[CacheEvent] = deque(maxlen=_MOST_EVENTS)
        self.stats = TransferStats()
        """The figures of both sides of the connector."""
        if scheduler_connector is not None:
            scheduler_connector.set_xfer_handshake_metadata(self.worker.get_handshake_metadata())

    def add(
        self,
        prompt: ManyOf[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] = (),
        request_id: str | None = None,
        extra: bytes = b"",
        params: Mapping[str, Any] | None = None,
    ) -> Sequence:
        """Add a request; returns its record, which the engine updates.

        Raises:
            ValueError: the prompt is empty, or longer than the model's context or the whole cache.
        """
        if not prompt or max_new_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one new token")
        if len(prompt) + max_new_tokens > self.facts.context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit the model's"
                f" context of {self.facts.context}"
            )
        sequence = Sequence(
            request_id=request_id or f"request-{next(self._ids)}",
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            extra=extra,
            params=params or {},
        )
        self.scheduler.add(sequence)
        return sequence

    def abort(self, request_id: str) -> Token | None:
        """End a request now; ``None`` if it has already ended."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[Token]:
        """Plan, compute, record. Returns at most one token for each request."""
        step = self.scheduler.schedule()
        sampled, output = self.worker.execute(step)
        tokens = self.scheduler.update(step, sampled, output)
        self._events += [*self.worker.take_events(), *self.scheduler.take_events()]
        for snapshot in (output.stats, self.scheduler.take_stats()):
            if snapshot:
                self.stats.merge(snapshot)
        if not tokens and not step.output.scheduled:
            time.sleep(_PAUSE_S)
        return tokens

    def run(self) -> Iterator[Token]:
        """Step until no request is left; yields each token as it is computed."""
        while self.scheduler.has_requests:
            yield from self.step()

    def settle(self, timeout: float | None = None) -> None:
        """Step until the connector knows of every finished request, holds blocks only for other engines, and
        needs no more steps.

        Raises:
            TimeoutError: it still holds blocks, or has pending work.
        """
        deadline = Deadline.after(timeout)
        while self.scheduler.has_pending_connector_work:
            self.step()
            if deadline.expired and self.scheduler.has_pending_connector_work:
                raise TimeoutError(
                    f"the connector still holds blocks, or wants more steps, after {timeout} s"
                )

    def take_events(self) -> list[CacheEvent]:
        """Cache events of both sides since the last call; only the newest ones if there are very many."""
        events = list(self._events)
        self._events.clear()
        return events

    def shutdown(self) -> None:
        """Shut both sides of the connector down. Idempotent."""
        for side in self._connectors:
            if side is not None:
                side.shutdown()
