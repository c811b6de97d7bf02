"""The connector "lookup" with one fault each, and the law that the fault breaks."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.engine import RequestEnd
from kvplug.kit import Reason
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, GetJob, MissReason, Store, Timeout
from kvplug_lab.mutants import Sides, breaks
from kvplug_lookup.connector import worker
from kvplug_lookup.connector.load import Load
from kvplug_lookup.connector.plan import StepPlan
from kvplug_lookup.connector.save import Saver
from kvplug_lookup.connector.scheduler import LookupScheduler
from kvplug_lookup.connector.worker import LookupWorker

REASONS = {"fail": MissReason.STORE_GONE, "corrupt": MissReason.CORRUPT}
"""The results of a failing store, by the kind of the fault."""


class Judged(Sides):
    """The connector with a part in the place of the right one: of the two sides, and what the worker side
    makes.
    """

    connector = "lookup"
    options: ClassVar[dict[str, Any]] = {"load_policy": "always"}
    config = MappingProxyType(
        {
            "transport": "cpu",
            "connect_timeout_s": 20,
            "buffer_size": 256 << 20,
            "options": {"host": {"segment_bytes": 1 << 20}},
        }
    )
    injects_into_own = True
    serves_beside_others = True
    scheduler_factory: ClassVar[type[LookupScheduler]] = LookupScheduler
    worker_factory: ClassVar[type[LookupWorker]] = LookupWorker
    load: ClassVar[type[Load]] = Load
    saver: ClassVar[type[Saver]] = Saver
    parts = ("worker_factory", "scheduler_factory", "load", "saver")

    @pytest.fixture(autouse=True)
    def _faulty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvplug_testing.engine.fake.PATIENCE_S", 8.0)
        monkeypatch.setattr(worker, "Load", self.load)
        monkeypatch.setattr(worker, "Saver", self.saver)

    @pytest.fixture(autouse=True)
    def _faults_of_stores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._how = ""
        self._is_held = threading.Event()
        self._held: list[tuple[GetJob, Callable[[], GetJob]]] = []
        get = Store.submit_get

        def submit_get(store: Store, pages: Any, **given: Any) -> GetJob:
            job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(20))
            if self._how == "hold":
                job.on_cancel(lambda: job.set([MissReason.CANCELLED] * job.count))
                self._held.append((job, lambda: get(store, pages, **given)))
                self._is_held.set()
                return job
            self._complete_held()
            if not self._how:
                return get(store, pages, **given)
            job.set([REASONS[self._how]] * job.count)
            return job

        monkeypatch.setattr(Store, "submit_get", submit_get)

    def _complete_held(self) -> None:
        """Complete the jobs that were held up, unless they were cancelled."""
        held, self._held = self._held, []
        for job, get in held:
            if not job.done:
                job.set(get().wait(5.0))

    def inject_fault(self, how: str) -> None:
        self._how = how

    @contextlib.contextmanager
    def holding_up(self) -> Iterator[threading.Event]:
        with self.injecting_fault("hold"):
            yield self._is_held


class Mutant(Judged):
    """One fault."""


class LateMutant(Judged):
    """One fault of a connector whose loads in the background come three steps after they have begun."""

    @pytest.fixture(autouse=True)
    def _late(self, _faults_of_stores: None, monkeypatch: pytest.MonkeyPatch) -> None:
        num_steps, bind = 0, LookupWorker.bind_connector_metadata

        def bind_and_come(side: LookupWorker, metadata: Any) -> None:
            nonlocal num_steps
            num_steps = num_steps + 1 if self._held else 0
            if num_steps > 3:
                self._complete_held()
            if self._how in ("", "hold") and (loads := StepPlan.from_plain(metadata).loads):
                self._how = "hold" if all(load.in_background for load in loads) else ""
            bind(side, metadata)

        monkeypatch.setattr(LookupWorker, "bind_connector_metadata", bind_and_come)


# -- promises ----------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-2")
class TestPromisesABlockTooMany(LookupScheduler):
    """One block more than the peer holds is promised."""

    def _held(self, tracked: Any, start: int, usable: int) -> Any:
        found = super()._held(tracked, start, usable)
        return found and (found[0] + self._block_size, found[1])


@breaks(Mutant, "CONN-2")
class TestPromisesWhatWasNotKept(LookupScheduler):
    """What was to be saved is promised, whether it was kept or not."""

    planned: ClassVar[set[bytes]] = set()
    """Chains of pages, of all engines of this process."""

    def build_connector_meta(self, output: Any) -> Any:
        plain: Any = super().build_connector_meta(output)
        for save in StepPlan.from_plain(plain).saves:
            self.planned.update(save.pages(self._page_tokens)[0])
        return plain

    def _held(self, tracked: Any, start: int, usable: int) -> Any:
        found = super()._held(tracked, start, usable)
        chains = tracked.chains.upto(tracked.request.token_ids, usable)
        if not self.planned.issuperset(chains):
            return found
        return found and (max(found[0], len(chains) * self._page_tokens), found[1])


@breaks(Mutant, "CONN-2")
class TestForgetsTheExtra(LookupScheduler):
    """Prompts that differ in their adapters are taken for one."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        chains: Any = self._chains
        self._chains = lambda extra, *more: chains(b"", *more)  # type: ignore[assignment]


@breaks(Mutant, "CONN-2")
class TestRemembersItsBestAnswer(LookupScheduler):
    """What was promised once is promised again, however much has been computed meanwhile."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        before = self._tracked[request.request_id].num_promised
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(before, answer[0] or 0) or answer[0], answer[1]


@breaks(Mutant, "CONN-11")
class TestCountsAsSavedWhatIsPlanned(Saver):
    """What it has once planned to save is never saved again."""

    _planned: frozenset[bytes] = frozenset()

    def _begin_one(self, plan: Any) -> None:
        chains, _ = plan.pages(self.first.series.format.page_tokens)
        if self._planned.issuperset(chains):
            self._settle(chains)
        else:
            self._planned |= {*chains}
            super()._begin_one(plan)


@breaks(Mutant, "CONN-8")
class TestCountsEachAnswerAsAMatch(LookupScheduler):
    """A request is counted once for each query of its engine."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._context.stats.record("match")
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


# -- bytes -------------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-2")
class TestLoadsIntoTheWrongBlock(Load):
    """Two blocks of a load are taken for each other."""

    def __attrs_post_init__(self) -> None:
        tables = tuple((*table[:-2], *reversed(table[-2:])) for table in self.plan.block_ids)
        self.plan = attrs.evolve(self.plan, block_ids=tables)
        super().__attrs_post_init__()


@breaks(Mutant, "CONN-2")
class TestIsRightOnOneLayoutOnly(Load):
    """If heads come before tokens, the last head is not loaded."""

    def end(self) -> None:
        super().end()
        axes = self._groups.layout.axes
        for view in [view for layer in self._views for view in layer]:
            if axes.find("H") < axes.find("T"):
                view[[*self.block_ids], :, -1] = 0


# -- failures ----------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-3")
class TestTrustsWhatArrives(Load):
    """Pages that were changed on their way count as loaded."""

    def _missed_in(self, part: Any) -> Any:
        missed = super()._missed_in(part)
        return None if missed is not None and missed[1] == Reason.CORRUPT else missed


@breaks(Mutant, "CONN-3")
class TestNamesOneBlockOfAFailedLoad(Load):
    """Of the blocks of a failed load only the first is named."""

    @property
    def failed_block_ids(self) -> frozenset[int]:
        failed = super().failed_block_ids
        return frozenset(block for table in self.plan.block_ids for block in table[:1]) & failed


# -- blocks in use ----------------------------------------------------------------------------------


@breaks(Mutant, "CONN-4")
class TestSaysReceivedBeforeItHasWritten(LookupWorker):
    """A background load is named as soon as it has begun."""

    _named: frozenset[str] = frozenset()

    def get_finished(self, finished: frozenset[str]) -> Any:
        begun = {name for name, load in self._loads.items() if load.plan.in_background}
        sent, received = super().get_finished(finished)
        named = (received | begun) - self._named
        self._named |= named
        return sent, named


@breaks(LateMutant, "CONN-4")
class TestFreesWhatStillLoads(LookupScheduler):
    """The blocks of a request that ends while it loads are given back at once; the load goes on."""

    def request_finished(self, request: Any, block_ids: Any, end: RequestEnd) -> Any:
        keeps, params = super().request_finished(request, block_ids, end)
        self._forget.clear()
        return keeps and end is RequestEnd.FINISHED, params


@breaks(Mutant, "CONN-4")
class TestLoadsWhatWasPreempted(LookupScheduler):
    """A load stays planned when its request is preempted in the same step."""

    def build_connector_meta(self, output: Any) -> Any:
        return super().build_connector_meta(attrs.evolve(output, preempted_request_ids=frozenset()))


@breaks(LateMutant, "CONN-4")
class TestGoesOnLoadingIntoPreemptedBlocks(LookupWorker):
    """A background load goes on when its request was preempted."""

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        return None

    def _forget(self, request_id: str) -> None:
        return None


@breaks(Mutant, "CONN-4")
class TestReportsBlocksOfThePreempted(LookupWorker):
    """The blocks of a load that failed are reported once more when its request is preempted."""

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        super().handle_preemptions(request_ids)
        self._failed_blocks.update(self._suspect)


@breaks(Mutant, "CONN-4")
class TestKeepsBlocksForWhoIsGone(LookupScheduler):
    """Blocks of a request that ended are kept for a consumer even if that is gone."""

    def request_finished(self, request: Any, block_ids: Any, end: RequestEnd) -> Any:
        super().request_finished(request, block_ids, end)
        return True, None


@breaks(Mutant, "CONN-4")
class TestWritesWhatComesLate(Load):
    """What comes after a load has stalled is written into its blocks all the same."""

    def fail(self, error: BaseException) -> None:
        self.error = error

    @property
    def has_ended(self) -> bool:
        return self.error is not None or super().has_ended

    def wait_settled(self, timeout: float) -> bool:
        return self.error is not None or super().wait_settled(timeout)


# -- names -------------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-5")
class TestNamesARequestTwice(LookupWorker):
    """What was named as sent is named again in the step after."""

    _before: frozenset[str] = frozenset()

    def get_finished(self, finished: frozenset[str]) -> Any:
        sent, received = super().get_finished(finished)
        before, self._before = self._before, sent
        return sent | before, received


@breaks(Mutant, "CONN-5")
class TestNamesAsSentAndReceived(LookupWorker):
    """What has been received is named as sent as well."""

    def get_finished(self, finished: frozenset[str]) -> Any:
        sent, received = super().get_finished(finished)
        return sent | received, received


@breaks(Mutant, "CONN-5")
class TestNamesNobody(LookupWorker):
    """A request whose blocks are kept is never named."""

    def get_finished(self, finished: frozenset[str]) -> Any:
        return frozenset(), super().get_finished(finished)[1]


# -- steps in flight ---------------------------------------------------------------------------------


@breaks(Mutant, "CONN-6")
class TestSavesWhatAnotherConnectorFailedToLoad(LookupScheduler):
    """Tokens that count as computed are saved, whichever connector loaded them."""

    def build_connector_meta(self, output: Any) -> Any:
        return {**super().build_connector_meta(output), "doubted": []}  # type: ignore[dict-item]


@breaks(Mutant, "CONN-6")
class TestSavesWhatOthersShareWithAFailedLoad(Saver):
    """What was computed from the blocks of a load that failed is saved."""

    def spoil(self, suspect: frozenset[int]) -> frozenset[str]:
        return frozenset()


# -- forgetting --------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-7")
class TestForgetsNothing(LookupScheduler):
    """A reset returns true and does nothing."""

    def reset_cache(self) -> bool:
        return True


@breaks(Mutant, "CONN-7")
class TestForgetsWhatIsStoredAndNotWhatIsUnderWay(LookupScheduler):
    """A prompt that was partly computed before a reset is stored after it."""

    def reset_cache(self) -> bool:
        done = super().reset_cache()
        for tracked in self._tracked.values():
            tracked.is_old = False
        return done


# -- figures -----------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-8")
class TestCountsEveryOther(Load):
    """Of two loads that succeed one is counted."""

    _numbers = itertools.count()

    def end(self) -> None:
        stats, record = self._context.stats, self._context.stats.record

        def record_every_other(*given: Any, **more: Any) -> None:
            if next(self._numbers) % 2:
                record(*given, **more)

        with mock.patch.object(stats, "record", record_every_other):
            super().end()


@breaks(Mutant, "CONN-8")
class TestCountsAFailureTwice(LookupWorker):
    """A load that fails is counted under two reasons."""

    def _note_failure(self, load: Any) -> None:
        super()._note_failure(load)
        self._context.stats.fail("load", "other")


# -- steps that go on --------------------------------------------------------------------------------


@breaks(Mutant, "CONN-9")
class TestWaitsForWhatIsInTheBackground(LookupWorker):
    """A step waits for a background load until it has ended."""

    def get_finished(self, finished: frozenset[str]) -> Any:
        for load in self._loads.values():
            load.wait_for_layer(len(self._layer_names) - 1)
        return super().get_finished(finished)


@breaks(Mutant, "CONN-9")
class TestWaitsLongForWhatDoesNotCome(Load):
    """A load that receives nothing fails long after its limit."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._stall_timeout_s += 5


@breaks(Mutant, "CONN-9")
class TestHasStepsWaitWhereRequestsDo(LookupScheduler):
    """Only the option decides whether loads are in the background, not the engine."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._in_background = context.options.async_load


# -- order -------------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-1")
class TestPromisesOnlyWhoComesAlone(LookupScheduler):
    """While there is another request nothing is promised."""

    def _held(self, tracked: Any, start: int, usable: int) -> Any:
        return super()._held(tracked, start, usable) if len(self._tracked) == 1 else (start, ())


@breaks(Mutant, "CONN-1")
class TestLoadsIntoNothing(LookupWorker):
    """Without a cache nothing is loaded, and no error is raised."""

    def start_load_kv(self) -> None:
        if self._caches:
            super().start_load_kv()


@breaks(Mutant, "CONN-1")
class TestTakesBlocksForWhatWasNeverPromised(LookupScheduler):
    """An allocation without a promise before it is accepted."""

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        self._tracked[request.request_id].num_promised = num_external_tokens
        super().update_state_after_alloc(request, block_ids, num_external_tokens)


@breaks(Mutant, "CONN-1")
class TestLoadsLaterThanItsStepNeeds(LookupWorker):
    """A load has ended when the last layer is reached, and not for the first report after that."""

    def start_load_kv(self) -> None:
        return None

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        super().start_load_kv()
        return super().get_block_ids_with_load_errors()


# -- ends --------------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestShutdownWaitsForAStep(LookupScheduler):
    """Shutdown waits for the end of every request, and no step follows that would end it."""

    def shutdown(self) -> None:
        if self._tracked:
            threading.Event().wait()
        super().shutdown()


@breaks(Mutant, "ALL-1")
class TestShutdownAndALoadWaitForEachOther(LookupWorker):
    """Shutdown holds what a load that is under way needs for its end, and waits for that end."""

    def __init__(self, context: Any) -> None:
        self._ending, self._idle = threading.Lock(), threading.Event()
        self._idle.set()
        super().__init__(context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._idle.clear()
        super().wait_for_layer_load(layer_name)
        with self._ending:
            self._idle.set()

    def shutdown(self) -> None:
        with self._ending:
            self._idle.wait()
        super().shutdown()


@breaks(Mutant, "ALL-7")
class TestLeavesAThread(LookupWorker):
    """A thread that waits for work is never stopped."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@breaks(Mutant, "ALL-6")
class TestKeepsADescriptorInAForkedChild(LookupWorker):
    """A file is open until the shutdown, also in a forked child."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._descriptors = [os.open(os.devnull, os.O_RDONLY)]

    def shutdown(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        super().shutdown()


@breaks(Mutant, "ALL-8")
class TestWritesToStderrWhenAProgramLeaves(LookupWorker):
    """A program that leaves writes to stderr."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        atexit.register(os.write, 2, b"an engine is left open\n")


@breaks(Mutant, "ALL-2", "ALL-4", "ALL-5")
class TestWaitsForAPeerThatIsGone(LookupWorker):
    """A load that has failed since its peer is gone waits for it to come back."""

    def _note_failure(self, load: Any) -> None:
        threading.Event().wait()


@breaks(Mutant, "ALL-4")
class TestNamesNoAddress(LookupScheduler):
    """A TimeoutError does not name the address of the missing peer."""

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        try:
            super().wait_until_ready(timeout)
        except TimeoutError:
            raise TimeoutError("a peer did not come in time") from None


# -- the controls ------------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The connector "lookup" as it is."""

    is_control = True


class TestLateHasNoFault(LateMutant):
    """The same with loads that come late."""

    is_control = True
