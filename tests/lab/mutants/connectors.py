"""The connector "memory" with one fault each, and the law that the fault breaks."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import attrs
import pytest

from kvplug.engine import ConnectorSpec
from kvplug.engine.connector.values import RequestEnd
from kvplug.errors import KvplugError, PeerGoneError, StalledError
from kvplug_lab.mutants import breaks
from kvplug_testing.memory.connector import PARAMS, MemoryScheduler, MemoryWorker
from kvplug_testing.memory.connector.suite import MemoryConnectorContract
from kvplug_testing.memory.connector.table import EntryTable, PromptEntry, PromptLease

wanted: dict[str, set[str]] = {}
"""Of each contact, the requests whose KV was asked for and not loaded."""


class Mutant(MemoryConnectorContract):
    """One fault, in one of the two sides."""

    across_processes = False
    scheduler_factory: ClassVar[Callable[..., Any]] = MemoryScheduler
    worker_factory: ClassVar[Callable[..., Any]] = MemoryWorker
    parts = ("worker_factory", "scheduler_factory")
    breaks: tuple[str, ...] = ()

    def make_side(self, config: Any, side: str, **given: Any) -> Any:
        factory = self.worker_factory if side == "worker" else self.scheduler_factory
        load = "load_worker_factory" if side == "worker" else "load_factory"
        with mock.patch.object(ConnectorSpec, load, return_value=factory):
            return super().make_side(config, side, **given)

    @pytest.fixture(autouse=True)
    def _impatient_engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvplug_testing.engine.fake.PATIENCE_S", 8.0)


# -- promises ----------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-2")
class TestPromisesABlockTooMany(MemoryScheduler):
    """One block more than the peer holds is promised."""

    def _held(self, tracked: Any) -> int | None:
        held = super()._held(tracked)
        return held + self._block_size if held else held


@breaks(Mutant, "CONN-2", caught_by="test_what_was_refused_is_saved_by_the_next_request_that_computes_it")
class TestPromisesWhatWasNotKept(MemoryWorker):
    """For what there was no room is promised all the same."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        if self._table is not None:
            settle = self._table.settle
            self._table.settle = lambda ticket, is_stored: settle(ticket, is_stored=True)  # type: ignore[method-assign]


@breaks(Mutant, "CONN-2", caught_by="test_the_same_tokens_with_another_extra_are_another_prompt")
class TestForgetsTheExtra(MemoryScheduler):
    """Prompts that differ in their adapters are taken for one."""

    def _known(self, request: Any, call: str) -> Any:
        tracked = super()._known(request, call)
        tracked.request = attrs.evolve(request, extra=b"")
        return tracked

    def update_state_after_alloc(self, request: Any, *more: Any) -> None:
        super().update_state_after_alloc(attrs.evolve(request, extra=b""), *more)

    def request_finished(self, request: Any, *more: Any) -> Any:
        return super().request_finished(attrs.evolve(request, extra=b""), *more)


class TestForgetsTheWeights(Mutant):
    """Models that differ in their weights only are taken for one."""

    breaks = ("CONN-2",)
    caught_by = "test_nothing_of_another_model_is_promised"

    class scheduler_factory(MemoryScheduler):  # noqa: N801
        def __init__(self, context: Any) -> None:
            super().__init__(attrs.evolve(context, model=attrs.evolve(context.model, weights="")))

    class worker_factory(MemoryWorker):  # noqa: N801
        def __init__(self, context: Any) -> None:
            super().__init__(attrs.evolve(context, model=attrs.evolve(context.model, weights="")))


@breaks(Mutant, "CONN-2", caught_by="test_an_answer_depends_on_its_own_question_and_not_on_other_requests")
class TestRemembersItsBestAnswer(MemoryScheduler):
    """What was promised once is promised again, however much has been computed meanwhile."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tracked = self._tracked[request.request_id]
        before = tracked.answered
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        tracked.answered = max(before, tracked.answered, key=lambda answered: answered[1])
        return tracked.answered[1] or answer[0], answer[1]


@breaks(Mutant, "CONN-11")
class TestCountsAsSavedWhatIsPlanned(MemoryWorker):
    """What it has once planned to save is never saved again."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._planned: set[Any] = set()

    def _save(self, save: Any) -> None:
        key = (save["extra"], tuple(save["tokens"]))
        if key not in self._planned:
            self._planned.add(key)
            super()._save(save)
        elif self._table is not None:
            self._table.settle(save["ticket"], is_stored=False)


@breaks(Mutant, "CONN-8", caught_by="test_each_match_save_and_load_is_counted_once_with_its_size_or_a_reason")
class TestCountsEachAnswerAsAMatch(MemoryScheduler):
    """A request is counted as often as its engine asks about it."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._context.stats.record("match")
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


# -- bytes -------------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-2")
class TestLoadsIntoTheWrongBlock(MemoryWorker):
    """Two blocks of a load are taken for each other."""

    def _load(self, load: Any) -> bool:
        blocks = list(load["blocks"])
        return super()._load({**load, "blocks": (*blocks[:-2], *reversed(blocks[-2:]))})


@breaks(Mutant, "CONN-2")
class TestSwapsKeyAndValue(MemoryWorker):
    """Keys are stored as values, and values as keys."""

    def _entry(self, key: Any, blocks: Any) -> PromptEntry:
        entry = super()._entry(key, blocks)
        layers = tuple((key, None) if value is None else (value, key) for key, value in entry.layers)
        return attrs.evolve(entry, layers=layers, digests=self._digests(layers))


@breaks(Mutant, "CONN-2", caught_by="test_whatever_the_layout_is_what_arrives_is_right")
class TestIsRightOnOneLayoutOnly(MemoryWorker):
    """Where heads come before tokens, the last head is forgotten."""

    def _entry(self, key: Any, blocks: Any) -> PromptEntry:
        entry = super()._entry(key, blocks)
        if self._layout.axes.find("H") > self._layout.axes.find("T"):
            return entry
        for tensor, _ in entry.layers:
            tensor[:, -1] = 0
        return attrs.evolve(entry, digests=self._digests(entry.layers))


# -- failures ----------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-3")
class TestNeedsNoLayers(MemoryWorker):
    """It lets the engine leave out the calls in its layers, which would wait for its loads."""

    def has_connector_metadata(self) -> bool:
        return False

    def start_load_kv(self) -> None:
        pass

    def wait_for_save(self) -> None:
        super().start_load_kv()
        super().wait_for_save()


@breaks(Mutant, "CONN-3")
class TestReportsAStepLate(MemoryWorker):
    """Blocks whose load failed are named in the step after."""

    _late: frozenset[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        found, self._late = self._late, super().get_block_ids_with_load_errors()
        return found


@breaks(
    Mutant,
    "CONN-3",
    caught_by="test_whatever_fails_is_reported_and_never_used",
)
class TestTrustsWhatArrives(MemoryWorker):
    """Hashes are sent and not compared."""

    def _verify(self, entry: PromptEntry) -> None:
        return None


@breaks(Mutant, "CONN-3")
class TestNamesOneBlockOfAFailedLoad(MemoryWorker):
    """Of the blocks of a failed load only the first is named."""

    def _fail(self, load: Any, error: KvplugError) -> None:
        super()._fail({**load, "blocks": load["blocks"][: load["start"] // 16 + 1]}, error)


# -- blocks in use ----------------------------------------------------------------------------------


@breaks(Mutant, "CONN-4", caught_by="test_blocks_of_the_preempted_are_let_alone")
class TestSaysSentBeforeItHasRead(MemoryWorker):
    """A request is named as sent one step before its blocks are copied."""

    def get_finished(self, finished: frozenset[str]) -> Any:
        sent = frozenset(save["request"] for save in self._begun[1])
        return sent, super().get_finished(finished)[1]


class TestKeepsNoBlocks(Mutant):
    """Blocks that are saved in a later step are not kept."""

    breaks = ("CONN-4",)

    class scheduler_factory(MemoryScheduler):  # noqa: N801
        def request_finished(self, *given: Any) -> Any:
            return False, super().request_finished(*given)[1]

    class worker_factory(MemoryWorker):  # noqa: N801
        def get_finished(self, finished: frozenset[str]) -> Any:
            return frozenset(), super().get_finished(finished)[1]


@breaks(Mutant, "CONN-4", caught_by="test_whatever_engines_do_what_arrives_is_right")
class TestSaysReceivedBeforeItHasWritten(MemoryWorker):
    """A background load is named one step before it writes."""

    def get_finished(self, finished: frozenset[str]) -> Any:
        received = frozenset(load["request"] for load in self._begun[0])
        return super().get_finished(finished)[0], received


@breaks(Mutant, "CONN-4", caught_by="test_a_request_that_ends_while_it_loads_is_named_once_as_received")
class TestFreesWhatStillLoads(MemoryScheduler):
    """The blocks of a request that ends while it loads are given back at once; the load goes on."""

    def request_finished(self, request: Any, block_ids: Any, end: RequestEnd) -> Any:
        keeps, params = super().request_finished(request, block_ids, end)
        return keeps and end is RequestEnd.FINISHED, params


@breaks(Mutant, "CONN-4", caught_by="test_blocks_of_the_preempted_are_let_alone")
class TestLoadsWhatWasPreempted(MemoryScheduler):
    """A load stays planned when its request is preempted in the same step."""

    def build_connector_meta(self, output: Any) -> Any:
        return super().build_connector_meta(attrs.evolve(output, preempted_request_ids=frozenset()))


@breaks(Mutant, "CONN-4", caught_by="test_blocks_of_the_preempted_are_let_alone")
class TestGoesOnLoadingIntoPreemptedBlocks(MemoryWorker):
    """A background load does not hear that its request was preempted."""

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        return None


@breaks(Mutant, "CONN-4", caught_by="test_blocks_of_the_preempted_are_let_alone")
class TestReportsBlocksOfThePreempted(MemoryWorker):
    """The blocks of a load that failed are reported once more when its request is preempted."""

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        super().handle_preemptions(request_ids)
        self._failed_blocks.update(self._suspect)


class TestKeepsBlocksForWhoIsGone(Mutant):
    """Blocks that a consumer has asked for are kept until it has loaded them, and it may be gone."""

    breaks = ("CONN-4",)
    caught_by = "test_blocks_that_were_kept_for_a_consumer_that_is_shut_down_are_free_again"

    class scheduler_factory(MemoryScheduler):  # noqa: N801
        def _held(self, tracked: Any) -> int | None:
            reference = tracked.request.params.get(PARAMS)
            if reference is not None:
                wanted.setdefault(self._contact, set()).add(reference["request_id"])
            return super()._held(tracked)

    class worker_factory(MemoryWorker):  # noqa: N801
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self._unnamed: frozenset[str] = frozenset()

        def _load(self, load: Any) -> bool:
            has_ended = super()._load(load)
            wanted.pop(self._contact, None)
            return has_ended

        def get_finished(self, finished: frozenset[str]) -> Any:
            sent, received = super().get_finished(finished)
            sent |= self._unnamed
            self._unnamed = sent & wanted.get(self._contact, set())
            return sent - self._unnamed, received


@breaks(Mutant, "CONN-4", caught_by="test_a_load_that_is_held_up_holds_up_no_step_and_fails_in_time")
class TestWritesWhatComesLate(MemoryWorker):
    """What comes after a load has stalled is written into its blocks all the same."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._late: list[dict[str, Any]] = []

    def _fail(self, load: Any, error: KvplugError) -> None:
        super()._fail(load, error)
        if isinstance(error, StalledError):
            self._late.append({**load, "begun": math.inf})

    def get_finished(self, finished: frozenset[str]) -> Any:
        self._late = [load for load in self._late if not self._load(load)]
        return super().get_finished(finished)


# -- names -------------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-5")
class TestNamesARequestTwice(MemoryWorker):
    """What was named as sent is named again in the step after."""

    _before: frozenset[str] = frozenset()

    def get_finished(self, finished: frozenset[str]) -> Any:
        sent, received = super().get_finished(finished)
        before, self._before = self._before, sent
        return sent | before, received


@breaks(Mutant, "CONN-5")
class TestNamesAsSentAndReceived(MemoryWorker):
    """What has been received is named as sent as well."""

    def get_finished(self, finished: frozenset[str]) -> Any:
        sent, received = super().get_finished(finished)
        return sent | received, received


@breaks(Mutant, "CONN-5")
class TestNamesNobody(MemoryWorker):
    """A request whose blocks are kept is never named."""

    def get_finished(self, finished: frozenset[str]) -> Any:
        return frozenset(), super().get_finished(finished)[1]


# -- steps in flight ---------------------------------------------------------------------------------


@breaks(Mutant, "CONN-6", caught_by="test_what_failed_to_load_is_not_stored_by_steps_in_flight")
class TestSavesWhatAFailedLoadSpoilt(MemoryWorker):
    """A step that was planned before a load failed saves what it was told to."""

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._suspect.clear()
        super().bind_connector_metadata(metadata)


@breaks(Mutant, "CONN-6", caught_by="test_what_failed_to_load_is_not_stored_by_steps_in_flight")
class TestSavesWhatOthersShareWithAFailedLoad(MemoryWorker):
    """What is not saved after a failed load is its own request, and not those that share its blocks."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._failed_ever: set[str] = set()

    def _fail(self, load: Any, error: KvplugError) -> None:
        super()._fail(load, error)
        self._failed_ever.add(load["request"])

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._suspect.clear()
        super().bind_connector_metadata(metadata)
        saves = self._begun[1]
        saves[:] = [
            {**each, "tokens": ()} if each["request"] in self._failed_ever else each for each in saves
        ]


@breaks(Mutant, "CONN-6", caught_by="test_what_failed_to_load_is_not_stored_by_steps_in_flight")
class TestSavesWhatAnotherConnectorFailedToLoad(MemoryScheduler):
    """Tokens that count as computed are saved, whichever connector loaded them."""

    def build_connector_meta(self, output: Any) -> Any:
        return {**super().build_connector_meta(output), "doubted": []}  # type: ignore[dict-item]


# -- forgetting --------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-7")
class TestForgetsNothing(MemoryScheduler):
    """A reset says yes, and that is all."""

    def reset_cache(self) -> bool:
        return True


@breaks(Mutant, "CONN-7")
class TestForgetsWhatIsStoredAndNotWhatIsUnderWay(MemoryScheduler):
    """A prompt of which a part was computed before a reset is stored after it."""

    def reset_cache(self) -> bool:
        done = super().reset_cache()
        for tracked in self._tracked.values():
            tracked.is_old = False
        return done


# -- figures -----------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-8", caught_by="test_each_match_save_and_load_is_counted_once_with_its_size_or_a_reason")
class TestCountsAFailureAsDone(MemoryWorker):
    """A load that fails is counted like one that succeeds."""

    def _fail(self, load: Any, error: KvplugError) -> None:
        super()._fail(load, error)
        self._context.stats.reset()
        self._context.stats.record("load")


@breaks(Mutant, "CONN-8")
class TestCountsEveryOther(MemoryWorker):
    """Of two loads one is counted."""

    _num_loads = 0

    def _load(self, load: Any) -> bool:
        has_ended = super()._load(load)
        self._num_loads += 1
        if self._num_loads % 2 == 0:
            self._context.stats.reset()
        return has_ended


@breaks(Mutant, "CONN-8")
class TestCountsAFailureTwice(MemoryWorker):
    """A load that fails is counted under two reasons."""

    def _fail(self, load: Any, error: KvplugError) -> None:
        super()._fail(load, error)
        self._context.stats.fail("load", "other")


# -- steps that go on --------------------------------------------------------------------------------


@breaks(Mutant, "CONN-9")
class TestWaitsForWhatIsInTheBackground(MemoryWorker):
    """A step waits for a background load until it has ended."""

    def _load(self, load: Any) -> bool:
        while not super()._load(load):
            time.sleep(0.001)
        return True


@breaks(Mutant, "CONN-9", caught_by="test_a_load_that_is_held_up_holds_up_no_step_and_fails_in_time")
class TestWaitsLongForWhatDoesNotCome(MemoryWorker):
    """A load of which nothing comes fails long after its limit."""

    def _load(self, load: Any) -> bool:
        return super()._load({**load, "begun": load["begun"] + 5})


@breaks(
    Mutant,
    "CONN-9",
    caught_by="test_an_engine_that_lets_every_load_be_waited_for_gets_them_in_the_background",
)
class TestHasStepsWaitWhereRequestsDo(MemoryScheduler):
    """Whether it loads in the background is for its option alone to say, not for the engine."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._in_background = context.options.async_load


# -- order -------------------------------------------------------------------------------------------


@breaks(Mutant, "CONN-1")
class TestPromisesOnlyWhoComesAlone(MemoryScheduler):
    """While there is another request nothing is promised."""

    def _held(self, tracked: Any) -> int | None:
        return super()._held(tracked) if len(self._tracked) == 1 else 0


@breaks(Mutant, "CONN-1", caught_by="test_a_load_into_a_cache_that_was_not_registered_is_refused_by_name")
class TestLoadsIntoNothing(MemoryWorker):
    """Without a cache nothing is loaded, and no error is raised."""

    def start_load_kv(self) -> None:
        if self._caches:
            super().start_load_kv()


@breaks(Mutant, "CONN-1", caught_by="test_blocks_for_tokens_that_were_never_promised_are_refused_by_name")
class TestTakesBlocksForWhatWasNeverPromised(MemoryScheduler):
    """An allocation that no promise came before is believed."""

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        tracked = self._tracked[request.request_id]
        tracked.answered = (tracked.answered[0], num_external_tokens)
        super().update_state_after_alloc(request, block_ids, num_external_tokens)


@breaks(Mutant, "CONN-1")
class TestPassesObjectsAcross(MemoryScheduler):
    """What its scheduler side tells its worker side is no plain value."""

    def build_connector_meta(self, output: Any) -> Any:
        return {**super().build_connector_meta(output), "preempted": output.preempted_request_ids}  # type: ignore[dict-item]


@breaks(Mutant, "CONN-1")
class TestLoadsLaterThanItsStepNeeds(MemoryWorker):
    """A load has ended when the last layer is reached, and not for the first report after that."""

    def start_load_kv(self) -> None:
        return None

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        super().start_load_kv()
        return super().get_block_ids_with_load_errors()


# -- references --------------------------------------------------------------------------------------


class Believing(MemoryScheduler):
    """Takes references for good that are not."""

    def _peer(self) -> EntryTable:
        table, mutant = super()._peer(), self

        def lease_of(reference: Any) -> PromptLease | None:
            found = EntryTable._lease_of(table, reference)
            if found is not None or not isinstance(reference, dict):
                return found
            return next(filter(lambda each: mutant.believes(each.reference, reference), leases()), None)

        leases = lambda: table._leases.values()  # noqa: E731
        table._lease_of = lease_of  # type: ignore[method-assign]
        return table

    def believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        """Whether a reference is taken for that of a lease."""
        return False


def differ(ours: dict[str, Any], given: dict[str, Any]) -> set[str]:
    """The names of the values that differ."""
    return {name for name, value in ours.items() if given.get(name) != value}


@breaks(Mutant, "REF-1")
class TestTakesAnEarlierEpochForThisOne(Believing):
    """A reference of an earlier start of an engine is taken for one of this start."""

    def believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        return "epoch" in differ(ours, given) and "request_id" not in differ(ours, given)


@breaks(Mutant, "REF-1")
class TestTakesEveryGenerationForTheLast(Believing):
    """A reference is good for whatever its request has been leased last."""

    def believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        return "generation" in differ(ours, given) and not differ(ours, given) & {"epoch", "request_id"}


@breaks(Mutant, "REF-2")
class TestReadsTicketsAndBelievesWhatStandsBeside(Believing):
    """The ticket of a reference is not compared."""

    def believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        return differ(ours, given) == {"ticket"}


@breaks(Mutant, "REF-2")
class TestTakesTicketsOfAnyAge(MemoryScheduler):
    """A ticket is good for ever."""

    def _refused(self, tracked: Any, reason: Any) -> int:
        refused = super()._refused(tracked, reason)
        return len(tracked.request.token_ids) if reason == "expired" else refused


@breaks(Mutant, "REF-2")
class TestDialsWhoeverIsNamed(MemoryScheduler):
    """Before a reference is judged, its engine is called."""

    def _refused(self, tracked: Any, reason: Any) -> int:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0kvplug-no-listener")
        return super()._refused(tracked, reason)


@breaks(Mutant, "REF-2")
class TestMissesInSilence(MemoryScheduler):
    """A reference that is good for nothing is not counted."""

    def _refused(self, tracked: Any, reason: Any) -> int:
        return 0


@breaks(Mutant, "REF-2")
class TestRaisesAtForgedReferences(MemoryScheduler):
    """A reference that is none stops the engine."""

    def _refused(self, tracked: Any, reason: Any) -> int:
        raise ValueError("that is no reference")


# -- ends --------------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestShutdownWaitsForAStep(MemoryWorker):
    """Shutdown waits until what is in the background has ended, which no step is there for any more."""

    def shutdown(self) -> None:
        if any(self._begun) or self._loading or self._saving:
            threading.Event().wait()
        super().shutdown()


@breaks(Mutant, "ALL-1")
class TestShutdownAndALoadWaitForEachOther(MemoryWorker):
    """Shutdown holds what a load that is under way needs for its end, and waits for that end."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._ending, self._idle = threading.Lock(), threading.Event()
        self._idle.set()

    def start_load_kv(self, *args: Any) -> None:
        self._idle.clear()
        super().start_load_kv(*args)
        with self._ending:
            self._idle.set()

    def shutdown(self) -> None:
        with self._ending:
            self._idle.wait()
        super().shutdown()


@breaks(Mutant, "ALL-7")
class TestLeavesAThread(MemoryWorker):
    """A thread that waits for work is never told that there is none."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@breaks(Mutant, "ALL-6", caught_by="test_a_forked_child_holds_nothing_loads_nothing_and_disturbs_no_engine")
class TestKeepsADescriptorInAForkedChild(MemoryWorker):
    """A file is open until the shutdown, also in a forked child."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._descriptors = [os.open(os.devnull, os.O_RDONLY)]

    def shutdown(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        super().shutdown()


@breaks(Mutant, "ALL-8", caught_by="test_a_program_that_leaves_while_its_engines_work_ends_with_its_own_code")
class TestWritesToStderrWhenAProgramLeaves(MemoryWorker):
    """A program that leaves writes to stderr."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        atexit.register(os.write, 2, b"an engine is left open\n")


@breaks(Mutant, "ALL-2", "ALL-4", "ALL-5")
class TestWaitsForAPeerThatIsGone(MemoryWorker):
    """A load whose peer is gone waits for it to come back."""

    def _fail(self, load: Any, error: KvplugError) -> None:
        if isinstance(error, PeerGoneError):
            threading.Event().wait()
        super()._fail(load, error)


# -- the control -------------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The connector "memory" as it is."""

    is_control = True
