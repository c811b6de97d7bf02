"""The engine: one loop around the scheduler and the worker."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence as ManyOf
from typing import Any

from transformers import PreTrainedModel

from kvplug import Config, Registry, TimeoutError, build_connector
from kvplug.engine import CacheEvent, Parallelism, SchedulerConnector, SpanLog, TransferStats
from kvplug.transport import Deadline
from kvplug_transformers.engine.options import EngineOptions, cache_config
from kvplug_transformers.engine.rank import WrapPipe
from kvplug_transformers.engine.scheduler import Scheduler
from kvplug_transformers.engine.sequence import Sequence, Token
from kvplug_transformers.engine.worker import Worker
from kvplug_transformers.engine.workers import ShardedWorker, Workers
from kvplug_transformers.model.facts import describe

_PAUSE_S = 0.001
"""The pause after a step that had nothing to compute, while a load is under way in the background."""
_MOST_EVENTS = 10_000
"""How many cache events are kept; the oldest are dropped."""


class Engine:
    """A scheduler side and a worker side in one process, driven by one thread. Decoding is greedy.

    Example, without a connector::

        engine = Engine(model)
        sequence = engine.add(prompt_token_ids, max_new_tokens=32)
        for token in engine.run():
            print(token.token_id)

    ``Engine.connected`` makes an engine with the connector of a config.
    """

    @classmethod
    def connected(
        cls,
        model: PreTrainedModel | Workers,
        config: Config,
        options: EngineOptions | None = None,
        *,
        listen: str | None = None,
        connect: Mapping[int, str] | None = None,
        registry: Registry | None = None,
        wrap_pipe: WrapPipe | None = None,
    ) -> Engine:
        """An engine with both sides of the config's connector, which ``shutdown`` shuts down.

        Args:
            model: a model, or processes that share one; then these have the worker sides.
            listen: the address of worker 0, instead of the config's.
            connect: contacts of the peer engine's workers, by rank, instead of the config's.
            wrap_pipe: wraps every pipe of this process.

        Raises:
            UnsupportedError: as the constructor. The errors of ``build_connector`` and of :class:`Workers`.
        """
        options = options or EngineOptions()
        given: dict[str, Any] = {"listen": listen, "registry": registry, "wrap_pipe": wrap_pipe}
        worker: Worker | ShardedWorker
        if isinstance(model, Workers):
            size = model.size
            worker = model.open(options, connects=True, listen=listen, connect=connect)
        else:
            size = 1
            worker = Worker.connected(model, describe(model), options, config, connect=connect, **given)
        try:
            scheduler_side: Any = build_connector(
                config,
                "scheduler",
                model=worker.facts.info,
                cache=cache_config(worker.facts, options, size),
                parallelism=Parallelism(num_workers=size, tensor_size=size),
                # With the role "both" it follows the stores of its own workers, wherever they listen.
                connect=connect or dict(enumerate(worker.contacts)) or None,
                spans=(spans := SpanLog()),
                **given,
            )
        except BaseException:
            worker.shutdown()
            raise
        engine = cls(worker, options, scheduler_connector=scheduler_side)
        engine.spans = spans
        return engine

    def __init__(
        self,
        model: PreTrainedModel | Worker | ShardedWorker,
        options: EngineOptions | None = None,
        *,
        scheduler_connector: SchedulerConnector | None = None,
    ) -> None:
        """Allocates the pages and passes the worker side's handshake metadata to the scheduler side.

        Args:
            model: a model; or a worker with the same ``options``, and with its side of the connector if
                ``scheduler_connector`` is given.

        Raises:
            UnsupportedError: the model's cache is not keys and values per layer; the message has the reason.
        """
        self.options = options or EngineOptions()
        if not isinstance(model, (Worker, ShardedWorker)):
            model = Worker(model, describe(model), self.options)
        self.worker = model
        self.facts = model.facts
        self.scheduler = Scheduler(self.options, scheduler_connector)
        self.scheduler_connector = scheduler_connector
        self._ids = itertools.count()
        self.events: deque[CacheEvent] = deque(maxlen=_MOST_EVENTS)
        """Cache events of both sides, for the caller to remove; the newest ones if there are very many."""
        self.stats = TransferStats()
        """The figures of both sides of the connector."""
        self.spans = SpanLog()
        """What the requests waited for, on the connector's scheduler side."""
        if scheduler_connector is not None:
            scheduler_connector.set_xfer_handshake_metadata(self.worker.handshake_metadata)

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
        sampled, output, events = self.worker.execute(step)
        tokens = self.scheduler.update(step, sampled, output)
        self.events += [*events, *self.scheduler.take_events()]
        for snapshot in (output.stats, self.scheduler.take_stats()):
            if snapshot:
                self.stats.merge(snapshot)
        if not tokens and not step.scheduled:
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

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the connector's peers are connected. Returns what ``Worker.wait_until_ready`` does."""
        choice = self.worker.wait_until_ready()
        if self.scheduler_connector is not None:
            self.scheduler_connector.wait_until_ready()
        return choice

    def shutdown(self) -> None:
        """Shut both sides of the connector down. Idempotent."""
        if self.scheduler_connector is not None:
            self.scheduler_connector.shutdown()
        self.worker.shutdown()
