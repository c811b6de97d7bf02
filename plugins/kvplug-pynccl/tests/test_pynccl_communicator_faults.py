"""What goes wrong around the communicator "pynccl": ranks that die or stop, and NCCL that fails or hangs."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pynccl_group as ends
from kvplug import ConfigError, PeerGoneError, TimeoutError, TransportError
from kvplug_lab.gpu.fake import GPU_VARIABLE
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclInvalidArgumentError, NcclInvalidUsageError
from kvplug_testing.comparison import assert_filled
from kvplug_testing.waits import until

pytestmark = pytest.mark.full

ENDS = Path(__file__).with_name("pynccl_group.py")
groups, local_ranks, remote_ranks = ends.groups, ends.local_ranks, ends.remote_ranks
at_all, carry = ends.at_all, ends.carry
PATIENCE_S, STOP, KILL = ends.PATIENCE_S, ends.STOP, ends.KILL
METHODS = [
    "all_reduce",
    "all_gather",
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "batch_isend_irecv",
]


def sums(made: list[Any]) -> list[Any]:
    return at_all(
        made, lambda one: one.all_reduce(torch.full((2,), one.rank + 1), timeout=PATIENCE_S).tolist()
    )


def struck(children: list[Any], kind: str, how: Any = None) -> None:
    """The last rank is struck in the call; the others say so, by its number, and go on without it."""
    for child in children:
        assert child.recv() == "ready"
    for child in children:
        child.send("go")
    if how is not None:
        how()
    for child in children[:-1]:
        name, text = child.recv(timeout=PATIENCE_S)
        assert name == kind, text
        assert f"rank {len(children) - 1}" in text, text
    carry(children[:-1])
    total = sum(range(1, len(children)))
    for child in children[:-1]:
        assert child.result(timeout=PATIENCE_S) == [total] * 3
    children[-1].kill()


# -- ranks that die or stop --------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_is_killed_inside_a_collective_is_named_and_the_others_go_on(
    remote_ranks: Any, method: str
) -> None:
    children = remote_ranks(
        "survivor", 3, method, PATIENCE_S, {"exit_after": 0}, {}, int(Result.REMOTE_ERROR)
    )
    struck(children, "PeerGoneError")


@pytest.mark.parametrize("options", [{"check_order": True}, {"run_ahead": 4}, {}], ids=str)
def test_without_a_deadline_and_where_nccl_sees_nothing_a_death_is_heard(
    remote_ranks: Any, options: dict[str, Any]
) -> None:
    children = remote_ranks("survivor", 4, "all_reduce", None, {"exit_after": 0}, options, 0)
    struck(children, "PeerGoneError")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("all_reduce", {}),
        ("all_gatherv", {}),
        ("batch_isend_irecv", {}),
        ("all_reduce", {"check_order": True}),
        ("all_reduce", {"run_ahead": 4}),
    ],
    ids=str,
)
def test_a_rank_that_is_stopped_inside_a_collective_is_named_at_the_deadline(
    remote_ranks: Any, method: str, options: dict[str, Any]
) -> None:
    children = remote_ranks("survivor", 3, method, 2.0, {"hold": 1}, options, 0)
    struck(children, "TimeoutError", lambda: (time.sleep(0.5), children[-1].stop()))


def test_a_rank_that_dies_during_a_call_it_takes_no_part_in_is_named(remote_ranks: Any) -> None:
    children = remote_ranks("bystander", 3)
    for child in children:
        assert child.recv() == "ready"
    for child in children:
        child.send("go")
    children[2].kill()
    name, text = children[0].result(timeout=PATIENCE_S)
    assert name == "PeerGoneError"
    assert "rank 2" in text


@pytest.mark.parametrize(
    ("fault", "late", "kinds"),
    [
        (STOP, False, ["TimeoutError"]),
        (STOP, True, ["TimeoutError"]),
        (KILL, False, ["TimeoutError", "PeerGoneError"]),
        (KILL, True, ["PeerGoneError"]),
    ],
)
def test_a_rank_that_is_struck_while_the_ranks_meet_is_named(
    remote_ranks: Any, fault: int, late: bool, kinds: list[str]
) -> None:
    children = remote_ranks("joiner", 3, PATIENCE_S if kinds == ["PeerGoneError"] else 3.0, fault, late)
    assert children[-1].recv() == "struck"
    for child in children[:-1]:
        name, text = child.recv(timeout=PATIENCE_S)
        assert name in kinds, text
        assert "rank 2" in text
    children[-1].kill()


def test_only_the_rank_that_was_to_send_is_to_blame(local_ranks: Any) -> None:
    made = local_ranks(3)
    with pytest.raises(TimeoutError) as caught:
        made[0].recv((2,), torch.float32, 1, timeout=0.3)
    assert "rank 1" in str(caught.value)
    assert "rank 2" not in str(caught.value)
    for one in made[1:]:
        with pytest.raises(TimeoutError, match="rank 0 has given up"):
            one.all_reduce(torch.ones(2), timeout=PATIENCE_S)


# -- NCCL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [Result.INTERNAL_ERROR, Result.UNHANDLED_CUDA_ERROR, Result.SYSTEM_ERROR])
@pytest.mark.parametrize("run_ahead", [0, 3])
def test_an_asynchronous_error_is_raised_with_nccls_message_and_new_communicators_work(
    local_ranks: Any, controls: Any, result: Result, run_ahead: int
) -> None:
    made = local_ranks(2, run_ahead=run_ahead)
    controls.set(fail_after=controls.get("operations") + 2, fail_result=result)

    def call(one: Any) -> None:
        for _ in range(100):
            one.all_reduce(torch.ones(4), timeout=PATIENCE_S)
            one.synchronize(timeout=PATIENCE_S)

    found = at_all(made, call)
    assert all(isinstance(each, TransportError) for each in found), found
    assert all("asked to fail" in str(each) for each in found), found
    for one in made:
        with pytest.raises(TransportError, match="make another"):
            one.all_reduce(torch.ones(4))
    controls.set(fail_after=-1)
    until(lambda: controls.get("communicators") == 0)
    assert sums(local_ranks(2)) == [[3, 3]] * 2


@pytest.mark.parametrize("result", [Result.INTERNAL_ERROR, Result.UNHANDLED_CUDA_ERROR, Result.SYSTEM_ERROR])
def test_an_error_of_this_rank_is_not_blamed_on_one_that_is_slow(
    local_ranks: Any, controls: Any, result: Result
) -> None:
    made = local_ranks(2, check_order=False)
    controls.set(fail_after=controls.get("operations"), fail_result=result)
    with pytest.raises(TransportError, match="asked to fail"):
        made[0].all_reduce(torch.ones(2), timeout=PATIENCE_S)
    with pytest.raises(TransportError, match=r"rank 0 has given up.*asked to fail"):
        made[1].all_reduce(torch.ones(2), timeout=PATIENCE_S)


def test_what_nccl_refuses_is_not_another_ranks_fault(local_ranks: Any, controls: Any) -> None:
    made = local_ranks(2)
    controls.set(call_result=Result.INVALID_ARGUMENT)
    with pytest.raises(NcclInvalidArgumentError):
        made[0].all_reduce(torch.ones(2), timeout=PATIENCE_S)
    controls.set(call_result=0)
    with pytest.raises(TransportError, match="rank 0 has given up"):
        made[1].all_reduce(torch.ones(2), timeout=PATIENCE_S)


def test_devices_that_hang_are_given_up_at_the_deadline(local_ranks: Any, controls: Any) -> None:
    made = local_ranks(3)
    controls.set(hang_after=controls.get("operations"))
    found = at_all(made, lambda one: one.all_reduce(torch.ones(4), timeout=0.5))
    assert all(isinstance(each, TimeoutError) for each in found), found
    assert any("all_reduce did not end in time" in str(each) for each in found)
    controls.set(hang_after=-1)
    until(lambda: controls.get("communicators") == 0)
    assert sums(local_ranks(3)) == [[6, 6]] * 3


def test_an_abort_that_hangs_delays_no_call_for_long(local_ranks: Any, controls: Any, caplog: Any) -> None:
    made = local_ranks(2)
    controls.set(hold=1, abort_hangs=1)
    with caplog.at_level(logging.ERROR):
        found = at_all(made, lambda one: one.all_reduce(torch.ones(4), timeout=0.3))
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


def test_two_ranks_on_one_gpu_are_named_with_the_gpu(
    local_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_VARIABLE, "7")
    monkeypatch.setattr(HostDevice, "identity", "GPU-7")
    found = local_ranks(2)
    for each in found:
        assert isinstance(each, NcclInvalidUsageError), each
        assert "rank 0 and rank 1 have the same GPU (GPU-7), and each rank needs one of its own" in str(each)


def test_a_start_that_never_ends_is_given_up(local_ranks: Any, controls: Any) -> None:
    controls.set(init_hangs=1)
    for each in local_ranks(2, timeout_s=1.0):
        assert isinstance(each, TimeoutError), each
    controls.set(init_hangs=0)
    until(lambda: controls.get("communicators") == 0)
    assert sums(local_ranks(2)) == [[3, 3]] * 2


def test_a_rank_without_nccl_tells_the_others_at_once(local_ranks: Any) -> None:
    found = local_ranks(3, lambda rank: {"library": "/nowhere/libnccl.so.2"} if rank == 1 else {})
    assert all(isinstance(each, TransportError) for each in found), found
    assert all("/nowhere/libnccl.so.2" in str(each) for each in found), found
    assert all("rank 1 has given up" in str(found[rank]) for rank in (0, 2)), found


def test_ranks_that_do_not_agree_on_comparing_are_refused_everywhere(local_ranks: Any) -> None:
    found = local_ranks(2, lambda rank: {"check_order": rank == 1})
    assert any(isinstance(each, ConfigError) for each in found), found
    for each in found:  # the slower rank hears it from the other one
        assert isinstance(each, (ConfigError, TransportError)), each
        assert "rank 0 has False, rank 1 has True" in str(each)


def test_an_nccl_that_fails_to_start_is_quoted_everywhere(local_ranks: Any, controls: Any) -> None:
    controls.set(init_result=Result.UNHANDLED_CUDA_ERROR)
    for each in local_ranks(2):
        assert isinstance(each, TransportError), each
        assert "ncclUnhandledCudaError" in str(each)


def test_a_rank_that_comes_late_gets_an_error_and_no_result(local_ranks: Any) -> None:
    made = local_ranks(2)
    with pytest.raises(TimeoutError, match="rank 1"):
        made[0].broadcast(torch.ones(1 << 20), 1, timeout=0.3)
    with pytest.raises((TimeoutError, PeerGoneError)):
        made[1].broadcast(torch.ones(1 << 20), 1, timeout=PATIENCE_S)


def test_a_call_that_is_interrupted_is_given_up_at_all_ranks(
    local_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = local_ranks(2)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made[0]._mesh, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made[0].all_reduce(torch.ones(2), timeout=PATIENCE_S)
    assert made[0]._inflight._comm.is_aborted
    with pytest.raises(TransportError, match="rank 0 has given up"):
        made[1].all_reduce(torch.ones(2), timeout=PATIENCE_S)
