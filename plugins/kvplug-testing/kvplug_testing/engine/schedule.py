"""Random schedules of valid engine steps, including orders that no known engine uses."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import attrs

from kvplug.engine import RequestEnd, WorkerOutput
from kvplug_testing.engine import fake
from kvplug_testing.engine.fake import CallOrder, FakeEngine, PlannedStep, Scheduled
from kvplug_testing.engine.load_audit import Load, LoadAudit
from kvplug_testing.engine.requests import Arrival, Running, State

Blocks = tuple[int, ...]


@attrs.frozen(kw_only=True)
class _Step:
    planned: PlannedStep
    computed: tuple[tuple[Running, int, int], ...]
    """Each request, its ``life`` at that time, and its number of tokens after this step."""
    needs_loads: bool


class Schedule:
    """One engine's work as random moves; the same seed gives the same moves.

    It shares prefixes, computes prompts in chunks, preempts, aborts, plans steps before earlier ones are
    executed or reported, rolls back after failed loads, and reuses freed blocks at once. It checks that all
    KV that counts as computed is right, and that free blocks are not written to.

    Args:
        chance: the source of random numbers.
        depth: the number of steps that may be planned and not yet reported.
        drafts: the engine ends its steps after their reports; see :class:`CallOrder`.
        before_step: called before each step is executed, for example to make its loads fail.
    """

    def __init__(
        self,
        fake: FakeEngine,
        chance: random.Random,
        *,
        depth: int = 1,
        drafts: bool = False,
        before_step: Callable[[], Any] = lambda: None,
        on_end: Callable[[Arrival, dict[str, Any] | None], Any] = lambda arrival, params: None,
    ) -> None:
        self.fake, self.chance, self.depth, self.drafts = fake, chance, depth, drafts
        self._block_size = fake.block_size
        self.before_step, self.on_end = before_step, on_end
        self.audit = LoadAudit(fake.cache)
        """What the connector has promised, and the loads that have begun and not ended."""
        self.coming: deque[Running] = deque()
        """Requests that have not arrived yet."""
        self.active: list[Running] = []
        """Requests that have arrived and not ended."""
        self._planned: deque[_Step] = deque()
        self._reports: deque[tuple[_Step, WorkerOutput]] = deque()
        self._users: Counter[int] = Counter()
        self._may_be_named: set[str] = set()
        self._blank: set[int] = set()
        self._freed = dict.fromkeys(fake.free_blocks, 0)
        """Free blocks, each with the step after which they may be overwritten: the last one planned before
        they were freed, or the one that reports the preemption of their request to the worker side.
        """
        self._to_preempt: list[Running] = []

    def submit(self, *arrivals: Arrival) -> None:
        """Add requests, which start in this order at random times."""
        self.coming += (Running(arrival) for arrival in arrivals)

    @property
    def has_work(self) -> bool:
        """Whether a request, a step, a report, a load or a lent block is left."""
        return bool(self._planned or self._reports or self._needs_steps)

    @property
    def _needs_steps(self) -> bool:
        left = self.coming or self.active or self.fake.kept.keys() - self.fake.lent or self.audit.loads
        return bool(left or self.fake.scheduler.has_pending_push_work())

    def run(self, *others: Schedule) -> None:
        """Run until all requests are done, alternating at random with other engines' schedules.

        Raises:
            AssertionError: a promise is broken, or the run does not end.
        """
        limit = time.monotonic() + fake.PATIENCE_S
        every = (self, *others)
        while busy := [each for each in every if each.has_work]:
            assert time.monotonic() < limit, f"no end after {fake.PATIENCE_S} s: {[*map(str, busy)]}"
            self.chance.choice(busy).move()

    def __str__(self) -> str:
        states = ", ".join(f"{each.name} {each.state.value}" for each in (*self.coming, *self.active))
        return f"{states or 'no request'}; kept: {sorted(self.fake.kept)}; loads: {sorted(self.audit.loads)}"

    # -- moves ---------------------------------------------------------------------------------

    def move(self) -> None:
        """Make one random move, and check everything."""
        moves: list[tuple[int, Callable[[], Any]]] = []
        in_flight = len(self._planned) + len(self._reports)
        waiting = [each for each in self._in(State.WAITING) if each not in self._to_preempt]
        if self.coming:
            moves.append((2, self._begin_request))
        if waiting:
            moves.append((3, lambda: self._admit(self.chance.choice(waiting))))
        if in_flight < self.depth and self._needs_steps:
            moves.append((3, self._plan))
        if self._planned:
            moves.append((3, self._execute))
        if self._reports:
            moves.append((2, self._apply_report))
        if ending := [each for each in self.active if self._may_end(each)]:
            moves.append((2, lambda: self._end(self.chance.choice(ending))))
        weights, calls = zip(*moves, strict=True)
        chosen = self.chance.choices(calls, weights)[0]
        chosen()
        if chosen in (self._execute, self._apply_report):
            self._check_cache()

    def _begin_request(self) -> None:
        each = self.coming.popleft()
        self.active.append(each)
        self.fake.scheduler.on_new_request(each.request())

    def _admit(self, each: Running) -> None:
        """Ask, and allocate blocks if there are enough."""
        shared = self._shared(each)
        start, request = len(shared) * self._block_size, each.request()
        found: int | None = None
        for _ in range(self.chance.randrange(1, 4)):  # an engine may ask several times
            found, is_async = self.fake.scheduler.get_num_new_matched_tokens(request, start)
            self.audit.promise(request, start, found, is_async)
        if found is None:
            time.sleep(0.0002)
            return
        end = min(start + found, len(request.token_ids) - 1)
        wanted = start + found if is_async else len(request.token_ids)
        if not self._grow(each, wanted, shared, preempts=False):
            return
        self.fake.scheduler.update_state_after_alloc(request, (each.blocks,), found)
        each.num_computed = end
        each.state = State.RUNNING
        if found:
            self.audit.loads[each.name] = Load(request, each.blocks, start, end, is_async)
            each.state = State.LOADING if is_async else State.RUNNING
        each.must_run = each.state is State.RUNNING

    def _shared(self, each: Running) -> Blocks:
        """Blocks of other requests with the same prefix; or none, as without a prefix cache."""
        best: Blocks = ()
        tokens = each.arrival.tokens[: len(each.request().token_ids) - 1]
        for other in self._victims() if self.chance.random() < 0.5 else ():
            if other.arrival.extra == each.arrival.extra:
                pairs = zip(tokens, other.arrival.tokens[: other.num_computed], strict=False)
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                best = max(best, other.blocks[: same // self._block_size], key=len)
        return best

    def _plan(self) -> None:
        scheduled: list[Scheduled] = []
        computed = []
        if self.chance.random() < 0.05 and (victims := self._victims()):
            self._preempt(self.chance.choice(victims))
        for each in self._in(State.RUNNING):
            if each.state is not State.RUNNING or each.rest <= 0:  # it may just have been preempted
                continue
            if not each.must_run and self.chance.random() < 0.2:
                continue
            prompt_left = len(each.arrival.prompt) - each.num_computed
            new = min(self.chance.choice([7, 16, 40, 200]), each.rest, max(1, prompt_left))
            if not self._grow(each, each.num_computed + new):
                continue
            each.must_run = False
            scheduled.append((each.request(each.num_computed + new), each.blocks, each.num_computed, new))
            each.num_computed += new
            computed.append((each, each.life, each.num_computed))
        preempted = frozenset(each.name for each in self._to_preempt)
        scheduled = [one for one in scheduled if one[0].request_id not in preempted]
        self._to_preempt.clear()
        planned = self.fake.plan(scheduled, preempted=preempted)
        self._planned.append(
            _Step(
                planned=planned,
                computed=tuple(one for one in computed if one[0].name not in preempted),
                needs_loads=self.audit.plan(planned.number),
            )
        )

    def _execute(self) -> None:
        step = self._planned.popleft()
        late = not step.needs_loads and self.chance.random() < 0.3
        order = CallOrder(loads_after_forward=late, drafts=self.drafts)
        self.before_step()
        report = self.fake.execute(step.planned, order=order)
        self.audit.judge(step.planned.number, report)
        self._reports.append((step, report))
        blank = [block for block, last in self._freed.items() if last <= step.planned.number]
        fresh = [block for block in blank if block not in self._blank]
        self.fake.cache.free(fresh)
        self._blank.update(fresh)
        if not step.planned.scheduled:
            time.sleep(0.0002)  # lets background threads run

    def _apply_report(self) -> None:
        step, report = self._reports.popleft()
        self._check_names(report)
        for name in report.finished_sending | report.finished_recving:
            self._release(self.fake.kept.get(name, ()))
        self.fake.hear(report)
        for each in [*self.active]:
            wrong = [at for at, block in enumerate(each.blocks) if block in report.invalid_block_ids]
            if wrong and self.chance.random() < 0.3:  # an engine may fail the request
                self._end(each, RequestEnd.FAILED)
            elif wrong:
                each.back_to(wrong[0] * self._block_size)
        for each in self._in(State.LOADING):
            if each.name not in report.finished_recving:
                continue
            each.state = State.RUNNING
            each.num_right = each.num_computed
            self.fake.scheduler.update_state_after_alloc(each.request(), (each.blocks,), 0)
        for each, life, end in step.computed:
            if each in self.active and each.life == life and each.state is State.RUNNING:
                each.num_right = max(each.num_right, end)

    def _may_end(self, each: Running) -> bool:
        if each.arrival.end is not RequestEnd.FINISHED:
            return self.chance.random() < 0.1
        return each.rest == 0 and (each.num_right == len(each.arrival.tokens) or self.chance.random() < 0.05)

    def _end(self, each: Running, end: RequestEnd | None = None) -> None:
        request = each.request()
        keeps, params = self.fake.finish(request, each.blocks, end or each.arrival.end)
        if (load := self.audit.loads.get(each.name)) is not None:
            load.is_checked = False
            if not load.step or (load.is_async and not keeps):
                del self.audit.loads[each.name]
                if load.step:
                    self._may_be_named.add(each.name)  # a report of it may be in flight
        self.active.remove(each)
        if each in self._to_preempt:
            self._to_preempt.remove(each)
        assert each.blocks or not keeps, f"{each.name} has no blocks, and they are kept"
        self._release(() if keeps else each.blocks)
        each.blocks = ()
        self.on_end(each.arrival, params)

    # -- blocks --------------------------------------------------------------------------------

    def _grow(self, each: Running, num_tokens: int, shared: Blocks = (), *, preempts: bool = True) -> bool:
        """Allocate blocks for this many tokens, after shared ones. Returns whether there are enough."""
        blocks = each.blocks or shared
        missing = max(0, -(-num_tokens // self._block_size) - len(blocks))
        while missing > len(self.fake.free_blocks):
            victims = [one for one in self._victims() if one is not each]
            if not victims or not preempts:
                return False
            self._preempt(victims[-1])
        fresh = self.fake.allocate(missing * self._block_size)
        for block in fresh:
            del self._freed[block]
            self._blank.discard(block)
        self._users.update(fresh if each.blocks else (*shared, *fresh))
        each.blocks = blocks + fresh
        return True

    def _in(self, state: State) -> list[Running]:
        return [each for each in self.active if each.state is state]

    def _victims(self) -> list[Running]:
        return [each for each in self._in(State.RUNNING) if not each.must_run]

    def _preempt(self, each: Running) -> None:
        """Preempt the request: it loses its blocks and waits. The step being planned reports
        that to the connector.

        Until that one is executed the worker side may read the blocks: what overwrites them sooner, in steps
        that were planned before, spoils pages that are being saved.
        """
        load = self.audit.loads.get(each.name)
        if load is not None and not load.step:  # no step includes it yet
            del self.audit.loads[each.name]
        self._release(each.blocks, self.fake.step_number + 1)
        each.blocks, each.state, each.must_run = (), State.WAITING, False
        each.back_to(0)
        each.generation += 1
        self._to_preempt.append(each)

    def _release(self, blocks: Iterable[int], after: int | None = None) -> None:
        """Free the blocks that no other request has; they may be overwritten after the step ``after``, by
        default the last one planned.
        """
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._freed[block] = self.fake.step_number if after is None else after
                # The next request gets the most recently freed blocks.
                self.fake.free_blocks.insert(0, block)

    # -- checks --------------------------------------------------------------------------------

    def _check_names(self, report: WorkerOutput) -> None:
        """Check that each request is named once, as sent or as received, and drop loads that have ended."""
        sent, received = report.finished_sending, report.finished_recving
        assert not sent & received, f"{sorted(sent & received)} is named as sent and as received"
        loads = self.audit.loads
        assert not sent & loads.keys(), f"a request is named as sent while it loads: {sent}"
        loaded = {name for name, load in loads.items() if load.has_ended}
        unexpected = sorted((sent - self.fake.kept.keys() | (received - loaded)) - self._may_be_named)
        assert not unexpected, f"{unexpected} was named before, or nothing of it was under way"
        self._may_be_named -= sent | received
        for name in received & loaded:
            del loads[name]

    def _check_cache(self) -> None:
        """Check that all computed KV is right, and that free blocks are unchanged."""
        for each in self._in(State.RUNNING):
            wrong = self.fake.cache.wrong_blocks(each.arrival.tokens, each.blocks, 0, each.num_right)
            assert not wrong, f"the KV of {each.name} is wrong in blocks {sorted(wrong)}, and it is used"
        written = self.fake.cache.written(self._blank)
        assert not written, f"blocks {sorted(written)}, which are free, were written to"
