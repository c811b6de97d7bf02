"""What goes wrong around the communicator "pynccl": ranks that die or stop, and NCCL that fails or hangs."""

from __future__ import annotations

import logging
import signal
import time
from typing import Any

import pytest
import torch

import pynccl_group as ends
from communicator_ranks import check_joiners, check_survivors
from kvplug import ConfigError, KvplugError, TimeoutError, TransportError
from kvplug_lab.gpu.fake import GPU_VARIABLE
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_testing.comparison import assert_filled
from kvplug_testing.waits import until

pytestmark = pytest.mark.full

ENDS = ends.__file__
at_all, adds, sums, PATIENCE_S = ends.at_all, ends.adds, ends.sums, ends.PATIENCE_S
STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)
DIES, HANGS, SEES, BLIND = {"exit_after": 0}, {"hold": 1}, int(Result.REMOTE_ERROR), 0


# -- ranks that die or stop --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fault", "timeout", "options", "nccl"),
    [
        ("all_reduce", DIES, PATIENCE_S, {}, SEES),
        ("batch_isend_irecv", DIES, PATIENCE_S, {}, SEES),
        # Without a deadline, and where NCCL sees nothing.
        ("all_gatherv", DIES, None, {"run_ahead": 4}, BLIND),
        ("reduce_scatterv", DIES, None, {"check_order": True}, BLIND),
        ("all_gatherv", HANGS, 2.0, {}, BLIND),
        ("batch_isend_irecv", HANGS, 2.0, {"run_ahead": 4}, BLIND),
        ("all_reduce", HANGS, 2.0, {"check_order": True}, BLIND),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_or_stopped_inside_a_collective_is_named_and_the_others_go_on(
    ranks: Any,
    fake_path: str,
    method: str,
    fault: dict[str, int],
    timeout: float | None,
    options: dict[str, Any],
    nccl: int,
) -> None:
    given = {"path": fake_path, "faults": {"peer_result": nccl}, **options}
    children = ranks("survivor", ENDS, 3, given, method, timeout, [fake_path, fault])
    if fault is DIES:
        check_survivors(children, "PeerGoneError")
    else:
        check_survivors(children, "TimeoutError", lambda: (time.sleep(0.5), children[-1].stop()))


@pytest.mark.parametrize(
    ("fault", "when", "kinds"),
    [
        (STOP, "pipes", ["TimeoutError"]),
        (STOP, "nccl", ["TimeoutError"]),
        (KILL, "pipes", ["TimeoutError", "PeerGoneError"]),
        (KILL, "nccl", ["PeerGoneError"]),
    ],
)
def test_a_rank_that_is_struck_while_the_ranks_meet_is_named(
    ranks: Any, fake_path: str, fault: int, when: str, kinds: list[str]
) -> None:
    given = {"path": fake_path, "timeout_s": PATIENCE_S if kinds == ["PeerGoneError"] else 3.0}
    check_joiners(ranks("joiner", ENDS, 3, given, fault, when, 2), 2, kinds)


def test_only_the_rank_that_was_to_send_is_to_blame(local_ranks: Any) -> None:
    made = local_ranks(3)
    with pytest.raises(TimeoutError) as caught:
        made[0].recv((2,), torch.float32, 1, timeout=0.3)
    assert "rank 1" in str(caught.value)
    assert "rank 2" not in str(caught.value)
    for one in made[1:]:
        with pytest.raises(TimeoutError, match="rank 0 has given up"):
            adds(one)


# -- NCCL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "run_ahead"), [(Result.INTERNAL_ERROR, 0), (Result.UNHANDLED_CUDA_ERROR, 3)]
)
def test_an_asynchronous_error_is_raised_with_nccls_message_and_new_communicators_work(
    local_ranks: Any, controls: Any, result: Result, run_ahead: int
) -> None:
    made = local_ranks(2, run_ahead=run_ahead)
    controls.set(fail_after=controls.get("operations") + 2, fail_result=result)

    def call(one: Any) -> None:
        for _ in range(100):
            adds(one)
            one.synchronize(timeout=PATIENCE_S)

    found = at_all(made, call)
    assert all(isinstance(each, TransportError) for each in found), found
    assert all("asked to fail" in str(each) for each in found), found
    for one in made:
        with pytest.raises(TransportError, match="make another"):
            adds(one)
    controls.set(fail_after=-1)
    until(lambda: controls.get("communicators") == 0)
    assert sums(local_ranks(2)) == [[3, 3]] * 2


@pytest.mark.parametrize("why", [{"fail_after": 0}, {"call_result": Result.INVALID_ARGUMENT}])
def test_an_error_of_this_rank_is_not_blamed_on_one_that_is_slow_and_which_gets_the_reason(
    local_ranks: Any, controls: Any, why: dict[str, int]
) -> None:
    made = local_ranks(2)
    if "fail_after" in why:
        why = {"fail_after": controls.get("operations"), "fail_result": Result.SYSTEM_ERROR}
    controls.set(**why)
    with pytest.raises(NcclError):
        adds(made[0])
    controls.set(call_result=0)
    with pytest.raises(TransportError, match="rank 0 has given up"):
        adds(made[1])


def test_devices_that_hang_are_given_up_at_the_deadline(local_ranks: Any, controls: Any) -> None:
    made = local_ranks(3)
    controls.set(hang_after=controls.get("operations"))
    found = at_all(made, lambda one: adds(one, 0.5))
    assert all(isinstance(each, TimeoutError) for each in found), found
    assert any("all_reduce did not end in time" in str(each) for each in found)
    controls.set(hang_after=-1)
    until(lambda: controls.get("communicators") == 0)
    assert sums(local_ranks(3)) == [[6, 6]] * 3


def test_an_abort_that_hangs_delays_no_call_for_long(local_ranks: Any, controls: Any, caplog: Any) -> None:
    made = local_ranks(2)
    controls.set(hold=1, abort_hangs=1)
    with caplog.at_level(logging.ERROR):
        found = at_all(made, lambda one: adds(one, 0.3))
    assert all(isinstance(each, TimeoutError) for each in found), found
    assert "it may still write" in caplog.text
    for one in made:
        one.destroy()
    controls.set(hold=0)
    assert sums(local_ranks(2)) == [[3, 3]] * 2
    controls.set(abort_hangs=0)
    until(lambda: controls.get("communicators") <= 2)


def test_memory_of_a_call_that_ran_out_of_time_is_the_callers_again(local_ranks: Any, controls: Any) -> None:
    made = local_ranks(2)
    given = torch.zeros(1 << 16)
    controls.set(hold=1)
    found = at_all(made, lambda one: one.all_reduce(given if one.rank else torch.ones(1 << 16), timeout=0.3))
    assert all(isinstance(each, TimeoutError) for each in found), found
    given.fill_(9)
    controls.set(hold=0)
    until(lambda: controls.get("communicators") == 0)
    assert_filled(9, given)


# -- the start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "each", "kinds", "words"),
    [
        ({"init_hangs": 1}, {"timeout_s": 1.0}, TimeoutError, ""),
        ({"init_result": Result.UNHANDLED_CUDA_ERROR}, {}, TransportError, "ncclUnhandledCudaError"),
        ({}, {"library": "/nowhere/libnccl.so.2"}, TransportError, "/nowhere/libnccl.so.2"),
        # The slower rank hears it from the other one.
        ({}, {"check_order": True}, (ConfigError, TransportError), "rank 0 has False, rank 1 has True"),
    ],
    ids=["hangs", "fails", "no library", "disagree"],
)
def test_a_start_that_fails_at_one_rank_fails_at_all_with_the_reason_and_the_next_one_works(
    local_ranks: Any, controls: Any, faults: dict[str, int], each: dict[str, Any], kinds: Any, words: str
) -> None:
    controls.set(**faults)
    for error in local_ranks(2, lambda rank: each if rank or "timeout_s" in each else {}):
        assert isinstance(error, KvplugError) and isinstance(error, kinds), error
        assert words in str(error)
    controls.reset()
    until(lambda: controls.get("communicators") == 0)
    assert sums(local_ranks(2)) == [[3, 3]] * 2


def test_two_ranks_on_one_gpu_are_named_with_the_gpu(
    local_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_VARIABLE, "7")
    monkeypatch.setattr(HostDevice, "identity", "GPU-7")
    for each in local_ranks(2):
        assert isinstance(each, TransportError), each
        assert "rank 0 and rank 1 have the same GPU (GPU-7), and each rank needs one of its own" in str(each)
