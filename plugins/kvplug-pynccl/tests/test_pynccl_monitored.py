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


class Held:
    """Stands for a tensor."""


@pytest.fixture
def make(nccl: Library, controls: Any) -> Callable[..., MonitoredCommunicator]:
    def make(world_size: int = 1) -> MonitoredCommunicator:
        unique_id = nccl.get_unique_id()
        return MonitoredCommunicator(
            nccl, unique_id, world_size, 0, what="the ranks of a test", current=nullcontext
        )

    return make


def settled(comm: MonitoredCommunicator) -> MonitoredCommunicator:
    comm.wait_until_settled(Deadline.after(30.0), lambda: None)
    return comm


def no_more_threads(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("why", ["the abort fails", "a call does not return"])
def test_memory_in_use_by_what_cannot_be_aborted_is_kept_for_good(
    make: Any, nccl: Library, monkeypatch: pytest.MonkeyPatch, caplog: Any, why: str
) -> None:
    monkeypatch.setattr(monitored, "_abandoned", [])
    comm, held = settled(make()), Held()
    seen, address = weakref.ref(held), comm._comm
    with monkeypatch.context() as patch:
        if why == "the abort fails":
            patch.setattr(
                nccl, "comm_abort", lambda _: (_ for _ in ()).throw(error_of(Result.INTERNAL_ERROR, "it"))
            )
        else:
            patch.setattr(monitored, "_CALL_WAIT_S", 0.01)
            comm._lock.acquire()
        over = comm.abort(held)
        until(lambda: "left as they are" in caplog.text)
    del held
    gc.collect()
    assert seen() is not None and not over.is_set()
    assert comm.abort() is over
    if comm._lock.locked():
        comm._lock.release()
    nccl.comm_abort(address)


def test_an_abort_that_gets_no_thread_of_its_own_is_done_all_the_same(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, held = settled(make()), Held()
    seen = weakref.ref(held)
    monkeypatch.setattr(monitored.threading.Thread, "start", no_more_threads)
    over = comm.abort(held)
    del held
    assert over.wait(20)
    until(lambda: gc.collect() >= 0 and seen() is None)


def test_when_the_program_leaves_an_abort_that_gets_no_thread_is_left_to_the_end_of_the_process(
    make: Any, nccl: Library, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    comm = settled(make())
    address = comm._comm
    with monkeypatch.context() as patch:
        patch.setattr(monitored.threading.Thread, "start", no_more_threads)
        patch.setattr(monitored, "is_leaving", lambda: True)
        assert comm.abort().is_set()
    assert not caplog.text
    nccl.comm_abort(address)


def test_memory_in_use_is_given_back_when_the_abort_is_over(make: Any) -> None:
    comm, held = settled(make()), Held()
    seen = weakref.ref(held)
    over = comm.abort(held)
    del held
    assert over.wait(30.0)
    until(lambda: seen() is None)


def test_a_start_that_fails_at_once_leaves_no_communicator(make: Any, controls: Any) -> None:
    before = controls.get("communicators")
    controls.set(begin_result=Result.INTERNAL_ERROR)
    with pytest.raises(NcclInternalError):
        make()
    until(lambda: controls.get("communicators") == before)


@pytest.mark.parametrize("value", ["1", " 1", "-2"])
def test_an_environment_that_has_nccl_block_is_refused(
    make: Any, controls: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    before = controls.get("communicators")
    monkeypatch.setenv(monitored.BLOCKING, value)
    with pytest.raises(ConfigError, match=rf"NCCL_COMM_BLOCKING is {value}: the ranks of a test.*unset it"):
        make()
    assert controls.get("communicators") == before
    monkeypatch.setenv(monitored.BLOCKING, "0")
    assert settled(make()).abort().wait(30.0)


@pytest.mark.parametrize("what", ["world size", "unique id"])
def test_ranks_that_disagree_get_an_error_in_time_and_the_process_goes_on(
    make: Any, nccl: Library, controls: Any, what: str
) -> None:
    before, ids = controls.get("communicators"), [nccl.get_unique_id() for _ in range(2)]

    def ranks(agree: bool) -> list[MonitoredCommunicator]:
        sizes = [2, 2] if agree or what == "unique id" else [2, 3]
        return [
            MonitoredCommunicator(
                nccl, ids[0 if agree or what == "world size" else rank], sizes[rank], rank, **given
            )
            for rank in range(2)
        ]

    given: dict[str, Any] = {"what": "the ranks of a test", "current": nullcontext}
    for comm in (apart := ranks(agree=False)):
        with pytest.raises(TimeoutError, match="another unique id or world size"):
            comm.wait_until_settled(Deadline.after(0.3), lambda: None)
    for comm in apart:
        assert comm.abort().wait(30.0)
    for comm in (together := ranks(agree=True)):
        settled(comm)
    for comm in together:
        assert comm.abort().wait(30.0)
    assert controls.get("communicators") == before


def test_a_start_that_runs_out_of_time_says_what_may_be_wrong(make: Any) -> None:
    comm = make(world_size=2)
    with pytest.raises(
        TimeoutError, match=r"the ranks of a test did not end in time.*unique id or world size"
    ):
        comm.wait_until_settled(Deadline.after(0.05), lambda: None)
    assert comm.abort().wait(30.0)
    with pytest.raises((NcclError, TimeoutError)):
        comm.wait_until_settled(Deadline.after(0.05), lambda: None)
