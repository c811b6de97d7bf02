"""The communicator "pynccl": order with its caller's stream, running ahead, sleep, and what it refuses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pynccl_group as ends
from kvplug import ClosedError, ConfigError, PeerGoneError, TimeoutError, TransportError, UnsupportedError
from kvplug.transport import TensorMismatchError, WireError
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.communicator.bootstrap import RankHello, agree
from kvplug_pynccl.communicator.communicator import PyncclCommunicator
from kvplug_pynccl.communicator.memory import Part, are_contiguous
from kvplug_pynccl.communicator.side_channel import SideChannelEndpoint
from kvplug_testing.comparison import assert_filled

ENDS = Path(__file__).with_name("pynccl_group.py")
groups, local_ranks = ends.groups, ends.local_ranks
at_all, make, context_of = ends.at_all, ends.make, ends.context_of
threads, PATIENCE_S = ends.threads, ends.PATIENCE_S
SIZE = 1 << 12


# -- running ahead -----------------------------------------------------------------------------------


@pytest.fixture
def streams(controls: Any) -> Iterator[Callable[[int], list[fake.Stream]]]:
    """What stands for the current stream of each rank's caller."""
    made: list[fake.Stream] = []

    def start(count: int) -> list[fake.Stream]:
        made.extend(controls.stream() for _ in range(count))
        return made

    yield start
    for stream in made:
        stream.close()


@pytest.fixture
def ahead(fake_path: str, groups: Any, streams: Any) -> Iterator[Callable[..., Any]]:
    """Communicators of a group that run ahead, and their callers' streams."""
    made: list[Any] = []

    def start(world_size: int, run_ahead: int = 8, **given: Any) -> tuple[list[Any], list[fake.Stream]]:
        callers = streams(world_size)
        found = at_all(
            groups(world_size),
            lambda group: make(
                group, fake_path, HostDevice(fake_path, callers[group.rank]), run_ahead=run_ahead, **given
            ),
        )
        assert all(isinstance(each, PyncclCommunicator) for each in found), found
        made.extend(found)
        return found, callers

    yield start
    for one in made:
        one.destroy()


def copied(stream: fake.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
    stream.copy(to.data_ptr(), source.data_ptr(), source.nbytes)


def test_calls_return_before_the_device_is_done_and_everything_keeps_its_order(
    ahead: Any, controls: Any
) -> None:
    made, callers = ahead(2)
    given = [torch.full((SIZE,), float(rank + 1)) for rank in range(2)]
    work = [torch.zeros(SIZE) for _ in range(2)]
    seen = [[torch.zeros(SIZE) for _ in range(3)] for _ in range(2)]
    controls.set(hold=1)

    def call(one: Any) -> None:
        caller = callers[one.rank]
        copied(caller, work[one.rank], given[one.rank])
        for number in range(3):
            one.all_reduce(work[one.rank], timeout=PATIENCE_S)
            copied(caller, seen[one.rank][number], work[one.rank])

    assert at_all(made, call) == [None, None]
    assert not any(bool(each.any()) for each in seen[0] + seen[1]), "the device was held"
    controls.set(hold=0)
    assert at_all(made, lambda one: one.synchronize(timeout=PATIENCE_S)) == [None, None]
    for caller in callers:
        assert caller.synchronize(PATIENCE_S)
    for number, total in enumerate((3.0, 6.0, 12.0)):
        for each in seen:
            assert_filled(total, each[number])


def test_no_more_are_left_in_flight_than_the_option_says(ahead: Any, controls: Any) -> None:
    made, _ = ahead(2, run_ahead=2)
    controls.set(hold=1)
    for _ in range(2):
        assert at_all(made, lambda one: one.all_reduce(torch.ones(4), timeout=PATIENCE_S).shape) == [(4,)] * 2
    with pytest.raises(TimeoutError):
        made[0].all_reduce(torch.ones(4), timeout=0.3)
    controls.set(hold=0)


def test_what_is_left_in_flight_ends_at_its_deadline_without_another_call(ahead: Any, controls: Any) -> None:
    made, callers = ahead(3)
    made[0].all_reduce(torch.ones(4), timeout=0.4)
    made[2].all_reduce(torch.ones(4), timeout=0.4)
    for rank in (0, 2):
        assert callers[rank].synchronize(PATIENCE_S), "the caller's stream hangs"
    for rank in (0, 2):
        with pytest.raises(TimeoutError, match="rank 1"):
            made[rank].synchronize(timeout=PATIENCE_S)
        with pytest.raises(TransportError, match="make another"):
            made[rank].all_reduce(torch.ones(4))
    with pytest.raises((TimeoutError, TransportError)):
        made[1].all_reduce(torch.ones(4), timeout=PATIENCE_S)
        made[1].synchronize(timeout=PATIENCE_S)


def test_a_rank_that_leaves_an_operation_in_flight_is_named_by_the_next_call(ahead: Any) -> None:
    made, callers = ahead(2)
    made[0].all_reduce(torch.ones(4), timeout=None)
    made[1].destroy()
    assert callers[0].synchronize(PATIENCE_S)
    with pytest.raises(PeerGoneError, match="rank 1"):
        made[0].all_reduce(torch.ones(4), timeout=PATIENCE_S)


def test_synchronize_has_a_deadline_of_its_own(ahead: Any, controls: Any) -> None:
    made, _ = ahead(2)
    controls.set(hold=1)
    at_all(made, lambda one: one.all_reduce(torch.ones(4), timeout=None))
    with pytest.raises(TimeoutError):
        made[0].synchronize(timeout=0.2)
    controls.set(hold=0)


def test_the_thread_is_there_only_for_what_is_left_and_ends_with_its_communicator(
    ahead: Any, local_ranks: Any
) -> None:
    plain = local_ranks(2)
    at_all(plain, lambda one: one.all_reduce(torch.ones(4)))
    assert "kvplug-pynccl-watch" not in threads()
    made, _ = ahead(2)
    at_all(made, lambda one: one.all_reduce(torch.ones(4)))
    for one in made:
        one.synchronize(timeout=PATIENCE_S)
        one.destroy()
    for thread in [one._inflight._thread for one in made]:
        if thread is not None:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_without_running_ahead_there_is_nothing_to_synchronize(local_ranks: Any, controls: Any) -> None:
    made = local_ranks(2)
    at_all(made, lambda one: one.all_reduce(torch.ones(4)))
    assert at_all(made, lambda one: one.synchronize(timeout=0)) == [None, None]


# -- sleep -------------------------------------------------------------------------------------------


def test_asleep_nccl_gives_its_memory_back_where_it_can(local_ranks: Any) -> None:
    made = local_ranks(2)
    for one in made:
        one.suspend()
    comm = made[0]._inflight._comm
    with pytest.raises(Exception, match="suspended"):
        comm.launch(lambda handle: made[0]._nccl.all_reduce(0, 0, 1, 7, 0, handle, 0))
    for one in made:
        one.destroy()


def test_an_nccl_that_cannot_says_so_and_sleeps(
    groups: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = fake.OLD_NCCL.build(tmp_path)
    made = at_all(groups(2), lambda group: make(group, old))
    with caplog.at_level(logging.WARNING):
        for one in made:
            one.suspend()
    assert "keeps its memory meanwhile: 2.29.7 and later release it" in caplog.text
    with pytest.raises(TransportError, match="resume"):
        made[0].all_reduce(torch.ones(2))
    assert at_all(made, lambda one: one.resume()) == [None, None]
    found = at_all(made, lambda one: one.all_reduce(torch.ones(2), timeout=PATIENCE_S).tolist())
    assert found == [[2.0, 2.0]] * 2
    for one in made:
        one.destroy()


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64, torch.uint16]
)
def test_what_nccl_does_not_add_up_is_refused_by_name_and_moved(local_ranks: Any, dtype: torch.dtype) -> None:
    made = local_ranks(2)
    for one in made:
        for method in ("all_reduce", "reduce_scatter"):
            with pytest.raises(UnsupportedError, match=str(dtype).removeprefix("torch.")):
                getattr(one, method)(torch.zeros(4, dtype=dtype))
    bits = [torch.arange(rank, rank + 16, dtype=torch.uint8) % 2 for rank in range(2)]
    given = [each.view(dtype) for each in bits]
    found = at_all(made, lambda one: one.all_gather(given[one.rank], timeout=PATIENCE_S))
    assert [each.view(torch.uint8).tolist() for each in found] == [torch.cat(bits).tolist()] * 2


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64])
def test_unsigned_integers_are_added_up(local_ranks: Any, dtype: torch.dtype) -> None:
    made = local_ranks(2)
    given = [torch.tensor([2, 3], dtype=torch.int64).to(dtype) for _ in range(2)]
    found = at_all(made, lambda one: one.all_reduce(given[one.rank], timeout=PATIENCE_S))
    assert [each.to(torch.int64).tolist() for each in found] == [[4, 6]] * 2


def test_a_graph_that_is_being_captured_is_refused(local_ranks: Any) -> None:
    made = local_ranks(2)
    for one in made:
        one._gpu.capturing = True
        with pytest.raises(UnsupportedError, match="CUDA graph"):
            one.all_reduce(torch.ones(2))
        one._gpu.capturing = False
    assert at_all(made, lambda one: one.all_reduce(torch.ones(1), timeout=PATIENCE_S).item()) == [2.0] * 2


def test_another_device_than_a_gpu_is_refused(groups: Any) -> None:
    context = context_of(groups(1)[0], "")
    with pytest.raises(ConfigError, match="'pynccl' moves CUDA tensors, and the device is 'cpu'"):
        PyncclCommunicator(context)


def test_one_rank_alone_loads_and_opens_nothing(groups: Any, fake_path: str) -> None:
    group, device = groups(1)[0], HostDevice(fake_path)
    before = set(os.listdir("/proc/self/fd"))
    with make(group, "/nowhere", device) as one:
        assert set(os.listdir("/proc/self/fd")) == before
        given = torch.arange(3)
        assert one.all_reduce(given) is given
        one.synchronize()
        one.suspend()
        one.resume()
    with pytest.raises(ClosedError):
        one.all_reduce(given)


def test_where_ranks_compare_what_does_not_fit_never_reaches_nccl(local_ranks: Any, controls: Any) -> None:
    made = local_ranks(2, check_order=True)
    done = controls.get("operations")
    found = at_all(made, lambda one: one.all_reduce(torch.ones(2 + one.rank), timeout=PATIENCE_S))
    assert all(isinstance(each, TensorMismatchError) for each in found), found
    assert controls.get("operations") == done


# -- its parts ---------------------------------------------------------------------------------------


def hello(number: int, **given: Any) -> dict[str, Any]:
    usual = {"rank": number, "world_size": 2, "nccl": 23203, "check_order": False, "gpu": ""}
    return {**usual, "id": b"" if number else bytes(128), **given}


@pytest.mark.parametrize(
    ("second", "kind", "words"),
    [
        ({"world_size": 3}, ConfigError, "rank 1 of 2 says that it is rank 1 of 3"),
        ({"rank": 0}, ConfigError, "rank 1 of 2 says that it is rank 0 of 2"),
        ({"nccl": 22005}, TransportError, "rank 0 has 2.32.3, rank 1 has 2.20.5"),
        ({"check_order": True}, ConfigError, "rank 0 has False, rank 1 has True"),
        ({"id": bytes(128)}, WireError, "one unique id"),
        ({"gpu": None}, WireError, "does not start"),
    ],
)
def test_ranks_that_do_not_agree_are_quoted(second: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        agree([hello(0), hello(1, **second)])


def test_ranks_that_agree_have_rank_0s_id() -> None:
    unique_id, hellos = agree([hello(0, id=bytes(range(128))), hello(1)])
    assert bytes(unique_id) == bytes(range(128))
    assert [each.rank for each in hellos] == [0, 1]
    assert isinstance(hellos[0], RankHello)


def test_parts_are_one_if_they_follow_each_other_in_one_size() -> None:
    whole = torch.arange(12)
    assert are_contiguous([Part.of(part) for part in whole.split(4)])
    assert are_contiguous([Part.of(whole[:0])] * 2)
    assert not are_contiguous([Part.of(part) for part in whole.split([2, 4, 6])])
    assert not are_contiguous([Part.of(whole[4:8]), Part.of(whole[:4])])


def test_a_side_channel_carries_bytes_and_nothing_else(groups: Any) -> None:
    end = SideChannelEndpoint(context_of(groups(1)[0], ""))
    listener = end.listen()
    one = end.connect(listener.contact)
    other = listener.accept(PATIENCE_S)
    listener.close()
    with one, other:
        for message in (None, torch.arange(5, dtype=torch.uint8)):
            assert one.send_tensor(message, timeout=PATIENCE_S).done()
            got = other.recv_tensor(timeout=PATIENCE_S)
            assert got is None if message is None else torch.equal(got, message)
        with pytest.raises(UnsupportedError, match="bytes in a flat tensor"):
            one.send_tensor(torch.ones(2))
        with pytest.raises(UnsupportedError, match="into memory"):
            one.recv_tensor(torch.ones(2))
        with pytest.raises(TimeoutError):
            one.recv_tensor(timeout=0)
        assert one.peer
        assert "SideChannel to" in repr(one)
        other.abort()
        with pytest.raises(PeerGoneError):
            one.recv_tensor(timeout=PATIENCE_S)
    assert one.closed
