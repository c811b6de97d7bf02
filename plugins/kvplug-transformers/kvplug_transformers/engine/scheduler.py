"""Plans the steps; the side of the engine that calls a SchedulerConnector."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from kvplug.engine import (
    CacheEvent,
    RequestEnd,
    ScheduledRequest,
    SchedulerConnector,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug_transformers.engine.blocks import BlockPool, blocks_for
from kvplug_transformers.engine.options import EngineOptions
from kvplug_transformers.engine.sequence import Sequence, Status, Token
from kvplug_transformers.engine.step import Step

_log = logging.getLogger(__name__)

_ENDS = {"stop": RequestEnd.FINISHED, "length": RequestEnd.FINISHED, "abort": RequestEnd.ABORTED}


def first_bad_token(block_ids: list[int], invalid: frozenset[int], block_size: int) -> int | None:
    """The first token in an invalid block; ``None`` if all blocks are valid."""
    for index, block_id in enumerate(block_ids):
        if block_id in invalid:
            return index * block_size
    return None


class Scheduler:
    """The queues of requests and their blocks. It accesses no tensor.

    Requests are served oldest first, and running requests before waiting ones. A prompt longer than the rest
    of the step's budget is computed in chunks. When blocks run out, a request is preempted: it loses its
    blocks and starts over later. Waiting requests whose load has ended are preempted first, since they lose
    only the load; then the youngest running one. A preempted request never ends without being computed again,
    so that both values of a connector's ``requires_kv_delivery`` are satisfied. The calls to the connector
    are those of ``SchedulerConnector``'s docstring, in that order; each is made in one place, marked
    ``[connector]``.
    """

    def __init__(self, options: EngineOptions, connector: SchedulerConnector | None = None) -> None:
        self._options = options
        self._connector = connector
        self._pool = BlockPool(options.num_blocks)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._loading: dict[str, Sequence] = {}
        self._held: dict[str, list[int]] = {}
        self._lent: set[str] = set()
        """The held requests that are kept for another engine, which may need a long time."""
        self._ended_since_last_step: set[str] = set()
        self._preempted_in_this_step: set[str] = set()
        self._num_steps = 0

    # -- requests come and go --------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._waiting or self._running or self._loading)

    @property
    def has_pending_connector_work(self) -> bool:
        """Whether the connector has yet to learn of a finished request, holds blocks, or has pending push
        work. Blocks that it holds for another engine do not count.
        """
        return self._connector is not None and bool(
            self._ended_since_last_step
            or self._held.keys() - self._lent
            or self._connector.has_pending_push_work()  # [connector]
        )

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def add(self, sequence: Sequence) -> None:
        """Add a request to the queue.

        Raises:
            ValueError: it can never be served, or its id is in use.
        """
        size = self._options.block_size
        needed = blocks_for(len(sequence.prompt) + sequence.max_new_tokens - 1, size)
        if needed > self._options.num_blocks:
            raise ValueError(
                f"request {sequence.request_id!r} can grow to {needed} blocks of {size} tokens, and the"
                f" whole cache has {self._options.num_blocks}"
            )
        if sequence.request_id in self._sequences or sequence.request_id in self._held:
            raise ValueError(f"a request {sequence.request_id!r} exists already")
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)
        if self._connector is not None:
            self._connector.on_new_request(sequence.as_request())  # [connector]

    def abort(self, request_id: str) -> Token | None:
        """End a request now; ``None`` if there is no such request, or it has ended."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, "abort", "aborted")

    def _finish(self, sequence: Sequence, reason: str, error: str = "", token: int | None = None) -> Token:
        was_loading = sequence.status is Status.LOADING
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            del self._loading[sequence.request_id]
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.error = reason, error
        del self._sequences[sequence.request_id]
        keeps, params = False, None
        if self._connector is not None:
            end = _ENDS.get(reason, RequestEnd.FAILED)
            keeps, params = self._connector.request_finished(  # [connector]
                sequence.as_request(), sequence.as_block_ids(), end
            )
            self._ended_since_last_step.add(sequence.request_id)
        # A load that is still writing into the blocks keeps them, whatever the connector's answer.
        if keeps or was_loading:
            self._held[sequence.request_id] = sequence.block_ids
            if params is not None:
                self._lent.add(sequence.request_id)
        else:
            self._pool.free(sequence.block_ids)
        sequence.block_ids = []
        return Token(
            request_id=sequence.request_id, token_id=token, finish_reason=reason, error=error, params=params
        )

    # -- one step: plan ----------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Plan the next step. A step may compute nothing; then it only serves the connector."""
        self._num_steps += 1
        self._preempted_in_this_step = set()
        planned: list[tuple[Sequence, int]] = []
        budget = self._options.max_tokens_per_step
        for sequence in list(self._running):
            count = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if sequence.status is Status.RUNNING and count > 0 and self._grow(sequence, count):
                planned.append((sequence, count))
                budget -= count
        if not self._preempted_in_this_step:
            planned += self._admit(budget)

        output = SchedulerOutput(
            step=self._num_steps,
            scheduled=tuple(
                ScheduledRequest(
                    request_id=sequence.request_id,
                    num_computed_tokens=sequence.num_computed_tokens,
                    num_scheduled_tokens=count,
                )
                for sequence, count in planned
            ),
            block_ids=lambda request_id: self._sequences[request_id].as_block_ids(),
            token_ids=lambda request_id: self._sequences[request_id].all_tokens,
            preempted_request_ids=frozenset(self._preempted_in_this_step),
            finished_request_ids=frozenset(self._ended_since_last_step),
        )
        self._ended_since_last_step = set()
        metadata = None
        if self._connector is not None:
            metadata = self._connector.build_connector_meta(output)  # [connector]
        ends = [(sequence, sequence.num_computed_tokens + count) for sequence, count in planned]
        return Step(
            scheduled=output.scheduled,
            preempted_request_ids=output.preempted_request_ids,
            finished_request_ids=output.finished_request_ids,
            token_ids=tuple(
                tuple(sequence.all_tokens[sequence.num_computed_tokens : end]) for sequence, end in ends
            ),
            block_tables=tuple(tuple(sequence.block_ids) for sequence, _ in planned),
            samples=tuple(end == sequence.num_tokens for sequence, end in ends),
            metadata=metadata,
        )

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Find blocks for ``count`` more tokens, preempting younger requests. False: it was preempted
        itself.
        """
        end = sequence.num_computed_tokens + count
        while (blocks := self._blocks_up_to(sequence, end)) is None:
            victim = self._last_in_line_with_blocks() or self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += blocks
        return True

    def _blocks_up_to(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        missing = blocks_for(num_tokens, self._options.block_size) - len(sequence.block_ids)
        return self._pool.allocate(max(missing, 0))

    def _preempt(self, sequence: Sequence) -> None:
        _log.debug("request %.100r is preempted: no free blocks", sequence.request_id)
        self._pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.start_over()
        sequence.num_preemptions += 1
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            sequence.status = Status.WAITING
            self._waiting.appendleft(sequence)
        self._preempted_in_this_step.add(sequence.request_id)

    def _last_in_line_with_blocks(self) -> Sequence | None:
        """The last waiting request with blocks whose load has ended."""
        return next((sequence for sequence in reversed(self._waiting) if sequence.block_ids), None)

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Admit waiting requests, as far as the step's budget and the free blocks allow."""
        planned = []
        passed_over = []
        while self._waiting and budget > 0:
            if len(self._running) + len(self._loading) >= self._options.max_requests:
                break
            sequence = self._waiting[0]
            if sequence.request_id in self._ended_since_last_step:
                # The worker side does not know yet that the previous request of this id has ended.
                passed_over.append(self._waiting.popleft())
                continue
            external, in_background = self._ask_for_match(sequence)
            if external is None:  # not known yet: it keeps its position, and others may pass
                passed_over.append(self._waiting.popleft())
                continue
            loaded_up_to = sequence.num_computed_tokens + external
            # The last token is computed here in any case: its logits choose the next one.
            start = min(loaded_up_to, sequence.num_tokens - 1)
            count = 0 if in_background else min(sequence.num_tokens - start, budget)
            blocks = self._blocks_up_to(sequence, max(loaded_up_to, start + count))
            if blocks is None:
                self._break_deadlock(sequence)
                break
            self._waiting.popleft()
            sequence.block_ids += blocks
            sequence.external_end = loaded_up_to if external else 0
            if self._connector is not None:
                self._connector.update_state_after_alloc(  # [connector]
                    sequence.as_request(), sequence.as_block_ids(), external
                )
            if in_background:
                sequence.status = Status.LOADING
                self._loading[sequence.request_id] = sequence
            else:
                sequence.status = Status.RUNNING
                sequence.num_computed_tokens = start
                self._running.append(sequence)
                planned.append((sequence, count))
                budget -= count
        self._waiting.extendleft(reversed(passed_over))
        return planned

    def _break_deadlock(self, first: Sequence) -> None:
        """Preempt a request if loaded requests that need one more block each would wait for each other
        forever.
        """
        if self._running or self._loading:
            return  # their blocks will be freed
        victim = self._last_in_line_with_blocks()
        if victim is not None and victim is not first:
            self._preempt(victim)

    def _ask_for_match(self, sequence: Sequence) -> tuple[int | None, bool]:
        """How many tokens of this request the connector can load. It is not asked again after a load."""
        if self._connector is None or not sequence.may_load or sequence.num_computed_tokens > 0:
            return 0, False
        return self._connector.get_num_new_matched_tokens(sequence.as_request(), 0)  # [connector]

    # -- one step: results -------------------------------------------------------------------------

    def update(self, step: Step, sampled: dict[str, int], output: WorkerOutput) -> list[Token]:
        """Record the results of the step: tokens, loads that ended or failed, blocks that are free again."""
        if self._connector is not None:
            self._connector.update_connector_output(output)  # [connector]
        tokens = []
        for scheduled in step.scheduled:
            sequence = self._sequences.get(scheduled.request_id)
            if sequence is None or sequence.status is not Status.RUNNING:
                continue  # aborted while the step ran
            token = self._book(sequence, scheduled.num_scheduled_tokens, sampled, output)
            if token is not None:
                tokens.append(token)
        for sequence in self._loading.values():
            bad = first_bad_token(sequence.block_ids, output.invalid_block_ids, self._options.block_size)
            if bad is not None:
                known = sequence.valid_up_to
                sequence.valid_up_to = bad if known is None else min(bad, known)
        # Blocks held until now come first: a request that finishes below may hold its blocks from now on.
        for request_id in output.finished_sending | output.finished_recving:
            self._pool.free(self._held.pop(request_id, ()))
            self._lent.discard(request_id)
        for request_id in output.finished_recving:
            loading = self._loading.get(request_id)
            if loading is not None and (token := self._end_load(loading)) is not None:
                tokens.append(token)
        return tokens

    def _book(
        self, sequence: Sequence, count: int, sampled: dict[str, int], output: WorkerOutput
    ) -> Token | None:
        end = sequence.num_computed_tokens + count
        bad = first_bad_token(sequence.block_ids, output.invalid_block_ids, self._options.block_size)
        if bad is not None and bad < end:
            # This step computed with the bad blocks: its results, including its token, are dropped as well.
            return self._load_failed(sequence, bad)
        if sequence.external_end:
            sequence.num_loaded_tokens, sequence.external_end = sequence.external_end, 0
        sequence.num_computed_tokens = end
        token_id = sampled.get(sequence.request_id)
        if token_id is None:
            return None
        reason = sequence.append(token_id)
        if reason is not None:
            return self._finish(sequence, reason, token=token_id)
        return Token(request_id=sequence.request_id, token_id=token_id)

    def _end_load(self, sequence: Sequence) -> Token | None:
        """An asynchronous load has ended: the request goes to the front of the queue, with its loaded
        tokens.
        """
        end = sequence.external_end
        del self._loading[sequence.request_id]
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)
        if sequence.valid_up_to is not None and sequence.valid_up_to < end:
            return self._load_failed(sequence, sequence.valid_up_to)
        sequence.num_loaded_tokens = end
        sequence.num_computed_tokens = min(end, sequence.num_tokens - 1)
        sequence.external_end = 0
        return None

    def _load_failed(self, sequence: Sequence, bad: int) -> Token | None:
        """By policy, keep the tokens before the first bad one and compute the rest, or fail the request."""
        end = max(sequence.external_end, bad)
        sequence.num_failed_loads += 1
        sequence.load_error = f"the KV of tokens {bad} to {end} could not be loaded"
        _log.warning("request %.100r: %s", sequence.request_id, sequence.load_error)
        if self._options.load_failure_policy == "fail":
            return self._finish(sequence, "error", f"{sequence.load_error}, and the policy is to fail")
        sequence.num_loaded_tokens = sequence.num_computed_tokens = bad
        sequence.external_end, sequence.valid_up_to = 0, None
        sequence.may_load = False
        sequence.generation += 1
        return None

    def take_events(self) -> list[CacheEvent]:
        """Cache events of the scheduler side since the last call."""
        return [] if self._connector is None else list(self._connector.take_events())  # [connector]

    def take_stats(self) -> Mapping[str, Any] | None:
        """The scheduler side's stats since the last call."""
        return None if self._connector is None else self._connector.get_stats()  # [connector]
