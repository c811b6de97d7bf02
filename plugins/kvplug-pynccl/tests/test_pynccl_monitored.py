"""The communicator beneath the pipe: what becomes of one that NCCL does not give back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from kvplug import ConfigError, TimeoutError
from kvplug.transport import Deadline
from kvplug_pynccl import monitored
from kvplug_pynccl.monitored import MonitoredCommunicator
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclError, NcclInternalError, error_of
from kvplug_pynccl.nccl.library import Library
from kvplug_testing.waits import until

Make = Callable[..., MonitoredCommunicator]


class Held:
    """Stands for a tensor."""


@pytest.fixture
def make(nccl: Library, controls: Any) -> Make:
    """A communicator of one rank that has started, or of more that has begun to."""

    def make(world_size: int = 1, rank: int = 0, unique_id: Any = None) -> MonitoredCommunicator:
        unique_id = unique_id or nccl.get_unique_id()
        given: dict[str, Any] = {"what": "the ranks of a test", "current": nullcontext}
        made = MonitoredCommunicator(nccl, unique_id, world_size, rank, **given)
        if world_size == 1:
            made.wait_until_settled(Deadline.after(30.0), lambda: None)
        return made

    return make


def no_more_threads(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("why", ["the abort fails", "a call does not return"])
def test_memory_in_use_by_what_cannot_be_aborted_is_kept_for_good(
    make: Make, nccl: Library, monkeypatch: pytest.MonkeyPatch, caplog: Any, why: str
) -> None:
    monkeypatch.setattr(monitored, "_abandoned", [])
    comm, held = make(), Held()
    seen, address = weakref.ref(held), comm.comm

    def fails(comm: int) -> None:
        raise error_of(Result.INTERNAL_ERROR, "it")

    with monkeypatch.context() as patch:
        if why == "the abort fails":
            patch.setattr(nccl, "comm_abort", fails)
        else:
            patch.setattr(monitored, "_CALL_WAIT_S", 0.01)
            comm.lock.acquire()
        over = comm.abort(held)
        until(lambda: "left as they are" in caplog.text)
    del held
    gc.collect()
    assert seen() is not None and not over.is_set()
    assert comm.abort() is over
    nccl.comm_abort(address)


@pytest.mark.parametrize("threads", [True, False])
def test_memory_in_use_is_given_back_when_the_abort_is_over_which_needs_no_thread_of_its_own(
    make: Make, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    comm, held = make(), Held()
    seen = weakref.ref(held)
    if not threads:
        monkeypatch.setattr(monitored.threading.Thread, "start", no_more_threads)
    over = comm.abort(held)
    del held
    assert over.wait(30.0)
    until(lambda: gc.collect() >= 0 and seen() is None)


def test_a_start_that_fails_at_once_leaves_no_communicator(make: Make, controls: Any) -> None:
    before = controls.get("communicators")
    controls.set(begin_result=Result.INTERNAL_ERROR)
    with pytest.raises(NcclInternalError):
        make()
    until(lambda: controls.get("communicators") == before)


def test_an_environment_that_has_nccl_block_is_refused(
    make: Make, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = controls.get("communicators")
    for value in ("1", " 1", "-2"):
        monkeypatch.setenv(monitored.BLOCKING, value)
        with pytest.raises(
            ConfigError, match=rf"NCCL_COMM_BLOCKING is {value}: the ranks of a test.*unset it"
        ):
            make()
    assert controls.get("communicators") == before
    monkeypatch.setenv(monitored.BLOCKING, "0")
    assert make().abort().wait(30.0)


@pytest.mark.parametrize("what", ["world size", "unique id"])
def test_ranks_that_disagree_get_an_error_in_time_and_the_process_goes_on(
    make: Make, nccl: Library, controls: Any, what: str
) -> None:
    before, ids = controls.get("communicators"), [nccl.get_unique_id() for _ in range(2)]
    others = (2, ids[1]) if what == "unique id" else (3, ids[0])
    apart = [make(2, 0, ids[0]), make(others[0], 1, others[1])]
    words = r"the ranks of a test did not end in time.*unique id or world size"
    for comm in apart:
        with pytest.raises(TimeoutError, match=words):
            comm.wait_until_settled(Deadline.after(0.3), lambda: None)
    for comm in apart:
        assert comm.abort().wait(30.0)
        with pytest.raises((NcclError, TimeoutError)):
            comm.wait_until_settled(Deadline.after(0.05), lambda: None)
    together = [make(2, rank, ids[0]) for rank in range(2)]
    for comm in together:
        comm.wait_until_settled(Deadline.after(30.0), lambda: None)
    for comm in together:
        assert comm.abort().wait(30.0)
    assert controls.get("communicators") == before
