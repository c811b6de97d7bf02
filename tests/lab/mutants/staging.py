"""Staging with one fault each: a GPU shows it now and then, and the simulated device by a seed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from kvplug.net.streams import DeviceMark
from kvplug.transport.store.staging import staging, transfers
from kvplug.transport.store.staging.memory import StagedPages
from kvplug_lab.mutants import breaks
from kvplug_testing import ConnectorContract, StoreContract
from kvplug_testing.simulated import streams


class Faulty:
    """One fault, of the lane."""

    lane: type[transfers.Lane] = transfers.Lane
    parts = ("lane",)

    @pytest.fixture(autouse=True)
    def _faulty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "Lane", self.lane)


class Mutant(Faulty, StoreContract):
    """One fault, of the lane."""

    store = "memory"
    reached_by = "options"
    across_processes = False
    use_granularity_s = 0.0


class _Passed(DeviceMark):
    """A mark that counts as passed at once."""

    def wait(self) -> None:
        return None


@breaks(Mutant, "STORE-11")
class TestCountsCopiesAsDoneOnceTheyAreQueued(transfers.Lane):
    """Pages count as there, or go to the store, before the event behind their copies."""

    def mark(self) -> DeviceMark:
        with transfers.on_stream(self.stream):
            return _Passed(self.device)


@breaks(Mutant, "STORE-11")
class TestReadsBlocksThatAreUsedAgain(transfers.Lane):
    """What the engine queues after a put does not wait until the pages were read."""

    def make_caller_wait_for(self, mark: DeviceMark) -> None:
        pass


@breaks(Mutant, "STORE-11")
class TestLendsHostMemoryThatIsStillCopied(transfers.Lane):
    """Host memory is used for other pages while the device has not copied these yet."""

    def pages(self, form: Any, count: int, waiter: Any = None) -> StagedPages | None:
        whole = self.memory._whole
        assert whole is not None
        return StagedPages(form, count, whole[: StagedPages.nbytes_of(form, count)])


class TestForgetsTheDeadline(Mutant):
    """A request waits for the device, however long that does nothing."""

    breaks = ("STORE-11",)

    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        end = transfers.Put.end

        def wait(put: transfers.Put, reason: Any) -> bool:
            for piece in put.pieces:
                if piece.mark:
                    piece.mark.wait()
            return end(put, reason)

        monkeypatch.setattr(transfers.Put, "end", wait)


class TestKeepsPagesThatWereNotCopied(Mutant):
    """A failed copy goes unnoticed, and the store keeps what was in the memory before."""

    breaks = ("STORE-11",)

    @pytest.fixture(autouse=True)
    def _careless(self, monkeypatch: pytest.MonkeyPatch) -> None:
        do = transfers.Put.do

        def forget_and_do(put: transfers.Put, step: int) -> None:
            put.pieces[step].error = None
            do(put, step)

        monkeypatch.setattr(transfers.Put, "do", forget_and_do)
        monkeypatch.setattr(staging.Staging, "note_free_memory", _note_free_memory)


def _note_free_memory(staging: staging.Staging) -> None:
    """As :meth:`Staging.note_free_memory`, but no put ends because its copies failed."""
    for put in staging._puts.tasks():
        with staging._staging:
            transfers.stage_together([put])
        if put.has_steps():
            staging._add(staging._puts, put)


class TestKeepsPagesThatWereNotCopiedIntoTheStore(TestKeepsPagesThatWereNotCopied):
    """The same in memory of the store."""

    store = "host"
    reached_by = ""


class TestReusesMemoryOfTheStoreThatIsWritten(Mutant):
    """Memory of the store is free when the put has ended, and not when the device has written it."""

    store = "host"
    reached_by = ""
    breaks = ("STORE-11",)

    @pytest.fixture(autouse=True)
    def _hasty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = transfers.Put.ended

        def free_and_end(put: transfers.Put) -> None:
            for piece in put.pieces:
                if piece.staged is not None and not isinstance(piece.staged, StagedPages):
                    put._store.free(piece.staged)
            ended(put)

        monkeypatch.setattr(transfers.Put, "ended", free_and_end)


class ConnectorMutant(Faulty, ConnectorContract):
    """The same in engines with the connector "lookup"."""

    connector = "lookup"
    options: ClassVar[dict[str, Any]] = {"load_policy": "always"}
    config: ClassVar[dict[str, Any]] = {"stores": ["host"]}
    across_processes = False


class TestSavesBlocksThatAreUsedAgain(ConnectorMutant):
    """The engine uses blocks again while their pages are still being read."""

    breaks = ("CONN-10",)

    @pytest.fixture(autouse=True)
    def _late(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The device runs the copies only when it is asked for them, and it is asked late."""
        do = transfers.Put.do

        def late(put: transfers.Put, step: int) -> None:
            time.sleep(0.05)
            do(put, step)

        monkeypatch.setattr(transfers.Put, "do", late)
        before = list(streams._streams)
        yield
        streams._streams[:] = [*before, *(each for each in streams._streams if each not in before)]

    class lane(transfers.Lane):  # noqa: N801
        def make_caller_wait_for(self, mark: DeviceMark) -> None:
            if self.stream in streams._streams:
                streams._streams.remove(self.stream)


class TestGivesUpWhatFindsNoStagingMemory(ConnectorMutant):
    """Pages that find no host memory at once are not kept."""

    breaks = ("CONN-11",)

    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        queue = transfers.Put.queue

        def queue_and_drop(put: transfers.Put) -> None:
            queue(put)
            del put.pieces[put._num_staged :]
            put._num_steps = len(put.pieces)
            put.job.count = sum(len(piece.pages) for piece in put.pieces)

        monkeypatch.setattr(transfers.Put, "queue", queue_and_drop)


class TestLoadsCountOnceTheyAreQueued(ConnectorMutant):
    """A load has ended when its copies are queued."""

    breaks = ("CONN-10",)
    lane = TestCountsCopiesAsDoneOnceTheyAreQueued.lane


class TestConnectorHasNoFault(ConnectorMutant):
    """The connector "lookup" as it is."""

    is_control = True


class TestHasNoFault(Mutant):
    """Staging as it is."""

    is_control = True


class TestHostHasNoFault(Mutant):
    """Staging as it is, with memory of the store."""

    store = "host"
    reached_by = ""
    is_control = True
