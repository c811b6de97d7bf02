"""Loads of which nothing comes: when they have failed, who is held up, and what is written afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvplug_lookup.connector.stall import StallClock

from faulty_engines import made, tokens
from kvplug import TimeoutError
from kvplug.engine import KVLayout, StalledError
from kvplug.transport import Deadline
from kvplug_lookup.connector import load as load_module
from kvplug_lookup.connector.load import Load, Loader
from kvplug_lookup.connector.plan import LoadPlan
from kvplug_testing.waits import Call, until

pytestmark = pytest.mark.timeout(60)

STALL_S = 0.3
NUM_LAYERS = 3
LAYOUT = KVLayout("KBTHD", {"K": 2, "B": 8, "T": 16, "H": 1, "D": 4})
PART = torch.ones(32, 1, 4)
"""Keys or values of one layer of the prompt."""


def a_load(stall: StallClock, name: str = "a") -> Load:
    plan = LoadPlan(
        request_id=name,
        token_ids=tuple(tokens(32)),
        extra=b"",
        block_ids=(1, 2),
        start=0,
        in_background=True,
    )
    caches = tuple(torch.zeros(LAYOUT.shape) for _ in range(NUM_LAYERS))
    return made(plan, LAYOUT, caches, stall=stall)


class Writing:
    """Stands where layers are scattered, and stays there until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()
        scatter = load_module.scatter

        def write(*arguments: Any) -> None:
            self.has_begun.set()
            assert self.goes_on.wait(20)
            scatter(*arguments)

        monkeypatch.setattr(load_module, "scatter", write)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writing]:
    found = Writing(monkeypatch)
    yield found
    found.goes_on.set()


def test_a_load_that_fails_while_a_layer_is_written_is_given_up_after_that_layer(writing: Writing) -> None:
    load = a_load(StallClock(STALL_S))
    layer = Call(lambda: load.layer(0, PART, PART))
    assert writing.has_begun.wait(10)
    failing = Call(lambda: load.fail(TimeoutError("the test wants it so")))
    assert failing.is_blocked(), "it is given up, and a layer is still being written"
    writing.goes_on.set()
    failing.result()
    layer.result()
    before = [cache.clone() for cache in load._caches]
    for index in (1, 2):
        Call(lambda index=index: load.layer(index, PART, PART)).raised(TimeoutError)  # type: ignore[misc]
    assert all(map(torch.equal, before, load._caches)), "it had failed, and was written to"
    assert [cache.any().item() for cache in before] == [True, False, False]


def test_who_asks_while_a_layer_is_written_waits_for_nothing_and_it_has_not_stalled(writing: Writing) -> None:
    load = a_load(StallClock(0.01))
    layer = Call(lambda: load.layer(0, PART, PART))
    assert writing.has_begun.wait(10)
    time.sleep(0.05)  # longer than it may stall
    asking = Call(load.has_ended)
    assert asking.result(10) is False
    waiting = Call(lambda: load.wait_for_layer(0, Deadline.after(20)))
    assert waiting.is_blocked()
    writing.goes_on.set()
    waiting.result()
    layer.result()
    assert load.error is None


def test_a_load_of_which_nothing_comes_has_failed_for_who_asks_and_for_who_waits() -> None:
    asked, awaited = a_load(StallClock(STALL_S)), a_load(StallClock(STALL_S))
    assert not asked.has_ended()
    until(asked.has_ended, 10)
    waiting = Call(lambda: awaited.wait_for_layer(0, Deadline.after(20)))
    waiting.result(10)
    for load in (asked, awaited):
        assert isinstance(load.error, StalledError)
        assert load._stats.snapshot()["failures"] == {"load": {"stalled": 1}}
        with pytest.raises(StalledError):
            load.layer(0, PART, PART)
        assert not any(cache.any() for cache in load._caches)


def test_the_deadline_of_a_step_comes_before_a_stall_that_would_come_later() -> None:
    load = a_load(StallClock(20))
    Call(lambda: load.wait_for_layer(0, Deadline.after(0.1))).result(10)
    assert load._stats.snapshot()["failures"] == {"load": {"timeout": 1}}


def test_a_load_that_waits_for_its_turn_progresses_with_the_one_before_it() -> None:
    stall = StallClock(STALL_S)
    first, second = a_load(stall, "a"), a_load(stall, "b")
    for index in range(NUM_LAYERS):
        time.sleep(0.6 * STALL_S)  # together longer than it may stall
        first.layer(index, PART, PART)
        assert not second.has_ended()
    assert first.error is None
    assert first.has_ended()
    until(second.has_ended, 10)
    assert isinstance(second.error, StalledError)


class Silent:
    """A connection to a peer that is stopped while it is dialled."""

    def __init__(self) -> None:
        self.is_dialled, self.is_open = threading.Event(), threading.Event()
        self.asked: list[Any] = []

    def dial(self, deadline: Deadline) -> Any:
        self.is_dialled.set()
        if not self.is_open.wait(deadline.remaining()):
            raise TimeoutError("nobody answers")
        return self

    def select(self, token_ids: Any, *, sink: Load, **_: Any) -> None:
        self.asked.append(token_ids)
        for index in range(NUM_LAYERS):
            sink.layer(index, PART, PART)


def test_loads_behind_a_peer_that_is_dialled_fail_without_it_and_are_not_fetched_when_it_answers() -> None:
    silent = Silent()
    loader = Loader(silent.dial, timeout_s=20, stall_timeout_s=STALL_S)
    try:
        loads = [a_load(loader.stall, name) for name in "abc"]
        for load in loads:
            loader.submit(load)
        assert silent.is_dialled.wait(10)
        for load in loads:
            until(load.has_ended, 10)
            assert isinstance(load.error, StalledError)
        silent.is_open.set()
        late = a_load(loader.stall, "late")
        loader.submit(late)
        until(late.has_ended, 10)
        assert late.error is None
        assert len(silent.asked) == 1, "what had failed was fetched"
    finally:
        silent.is_open.set()
        loader.close()
