"""The communicator "pynccl": order with its caller's stream, running ahead, sleep, and what it refuses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import pynccl_group as ends
from kvplug import ClosedError, ConfigError, PeerGoneError, TimeoutError, TransportError, UnsupportedError
from kvplug.transport import WireError
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.communicator.bootstrap import agree
from kvplug_pynccl.communicator.communicator import PyncclCommunicator
from kvplug_pynccl.nccl.library import Library
from kvplug_testing.comparison import assert_filled

at_all, adds, sums, PATIENCE_S = ends.at_all, ends.adds, ends.sums, ends.PATIENCE_S
SIZE = 1 << 12


# -- running ahead -----------------------------------------------------------------------------------


@pytest.fixture
def ahead(fake_path: str, controls: Any, local_ranks: Any) -> Iterator[Callable[..., Any]]:
    """Communicators of a group that run ahead, and what stands for the current streams of their callers."""
    with ExitStack() as stack:

        def start(world_size: int, run_ahead: int = 8) -> tuple[list[Any], list[fake.Stream]]:
            callers = [controls.stream() for _ in range(world_size)]
            for caller in callers:
                stack.callback(caller.close)
            made = local_ranks(
                world_size,
                lambda rank: {"device": HostDevice(fake_path, callers[rank])},
                run_ahead=run_ahead,
            )
            for one in made:
                assert isinstance(one, PyncclCommunicator), one
                stack.callback(one.destroy)
            return made, callers

        yield start


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


def test_no_more_are_left_in_flight_than_the_option_says_and_synchronize_has_its_own_deadline(
    ahead: Any, controls: Any
) -> None:
    made, _ = ahead(2, run_ahead=2)
    others, _ = ahead(2)
    controls.set(hold=1)
    for _ in range(2):
        assert [each.shape for each in at_all(made, lambda one: adds(one, None))] == [(4,)] * 2
    with pytest.raises(TimeoutError):
        adds(made[0], 0.3)
    at_all(others, lambda one: adds(one, None))
    with pytest.raises(TimeoutError):
        others[0].synchronize(timeout=0.2)
    controls.set(hold=0)


def test_what_is_left_in_flight_ends_at_its_deadline_without_another_call(ahead: Any) -> None:
    made, callers = ahead(3)
    for rank in (0, 2):
        adds(made[rank], 0.4)
    for rank in (0, 2):
        assert callers[rank].synchronize(PATIENCE_S), "the caller's stream hangs"
    for rank in (0, 2):
        with pytest.raises(TimeoutError, match="rank 1"):
            made[rank].synchronize(timeout=PATIENCE_S)
        with pytest.raises(TransportError, match="make another"):
            adds(made[rank])
    with pytest.raises((TimeoutError, TransportError)):
        adds(made[1])
        made[1].synchronize(timeout=PATIENCE_S)


def test_a_rank_that_leaves_an_operation_in_flight_is_named_by_the_next_call(ahead: Any) -> None:
    made, callers = ahead(2)
    adds(made[0], None)
    made[1].destroy()
    assert callers[0].synchronize(PATIENCE_S)
    with pytest.raises(PeerGoneError, match="rank 1"):
        adds(made[0])


# -- sleep -------------------------------------------------------------------------------------------


def test_asleep_nccl_gives_its_memory_back_where_it_can(
    local_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("comm_suspend", "comm_resume"):
        function = getattr(Library, name)
        monkeypatch.setattr(Library, name, lambda *a, n=name, f=function: (asked.append(n), f(*a))[1])
    made = local_ranks(2)
    for method in ("suspend", "resume"):
        assert at_all(made, lambda one, method=method: getattr(one, method)()) == [None, None]
        assert asked == [f"comm_{method}"] * 2
        asked.clear()
    assert sums(made) == [[3, 3]] * 2


def test_an_nccl_that_cannot_says_so_and_sleeps(
    old_path: str, local_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = local_ranks(2, path=old_path)
    with caplog.at_level(logging.WARNING):
        for one in made:
            one.suspend()
    assert "keeps its memory meanwhile: 2.29.7 and later release it" in caplog.text
    with pytest.raises(TransportError, match="resume"):
        adds(made[0])
    assert at_all(made, lambda one: one.resume()) == [None, None]
    assert sums(made) == [[3, 3]] * 2


# -- what is refused ---------------------------------------------------------------------------------


def test_a_graph_that_is_being_captured_is_refused(local_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = local_ranks(2)
    with monkeypatch.context() as patch:
        patch.setattr(HostDevice, "is_capturing", lambda _: True)
        for one in made:
            with pytest.raises(UnsupportedError, match="CUDA graph"):
                adds(one)
    assert sums(made) == [[3, 3]] * 2


def test_one_rank_alone_loads_and_opens_nothing(groups: Any, fake_path: str) -> None:
    group, device = groups(1)[0], HostDevice(fake_path)
    before = set(os.listdir("/proc/self/fd"))
    with ends.make(group, "/nowhere", device) as one:
        assert set(os.listdir("/proc/self/fd")) == before
        given = torch.arange(3)
        assert one.all_reduce(given) is given
        one.synchronize()
        one.suspend()
        one.resume()
    with pytest.raises(ClosedError):
        one.all_reduce(given)


# -- its parts ---------------------------------------------------------------------------------------


def hello(number: int, **given: Any) -> dict[str, Any]:
    usual = {"nccl": 23203, "check_order": False, "gpu": ""}
    return {**usual, "id": b"" if number else bytes(range(128)), **given}


@pytest.mark.parametrize(
    ("second", "kind", "words"),
    [
        ({"nccl": 22005}, TransportError, "rank 0 has 2.32.3, rank 1 has 2.20.5"),
        ({"check_order": True}, ConfigError, "rank 0 has False, rank 1 has True"),
        ({"id": bytes(128)}, WireError, "one unique id"),
    ],
)
def test_ranks_that_agree_have_rank_0s_id_and_others_are_quoted(
    second: dict[str, Any], kind: type, words: str
) -> None:
    unique_id, hellos = agree([hello(0), hello(1)])
    assert bytes(unique_id) == bytes(range(128))
    assert [each.id for each in hellos] == [bytes(range(128)), b""]
    with pytest.raises(kind, match=words):
        agree([hello(0), hello(1, **second)])
