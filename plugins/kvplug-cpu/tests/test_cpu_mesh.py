"""What ranks say to each other beside a library: calls, tensors and news on one pipe, each in its order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvplug import ClosedError, PeerGoneError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug.net.wire import encode
from kvplug.transport import Deadline, Mesh, WireError
from kvplug_testing.comparison import assert_same


class OwnError(TransportError):
    """Of this rank's system."""


SOON = 30.0
AT_ONCE = 0.2


def within(seconds: float | None) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture
def pipes(endpoint: Any) -> list[dict[int, Any]]:
    """Of three ranks: to each other one."""
    pipes: list[dict[int, Any]] = [{}, {}, {}]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        end = endpoint()
        with end.listen() as listener:
            pipes[high][low] = end.connect(listener.contact)
            pipes[low][high] = listener.accept()
    return pipes


@pytest.fixture
def meshes(pipes: list[dict[int, Any]]) -> Iterator[list[Mesh]]:
    """Three ranks, each with its pipes, in one thread."""
    with ExitStack() as stack:
        made = [Mesh(each) for each in pipes]
        for mesh in made:
            stack.callback(mesh.abort)
        yield made


def announce(pipe: Any, news: Any) -> None:
    """As a rank does."""
    pipe.send_tensor(None)
    pipe.send_tensor(torch.frombuffer(bytearray(encode(news)), dtype=torch.uint8))


def test_calls_are_heard_from_each_rank_in_order(meshes: list[Mesh]) -> None:
    for number in range(2):
        for rank in (1, 2):
            meshes[rank].send({0: {"call": number, "rank": rank}}, within(SOON))
    for number in range(2):
        found = meshes[0].recv([1, 2], within(SOON))
        assert found == {rank: {"call": number, "rank": rank} for rank in (1, 2)}


def test_who_says_nothing_is_named_and_who_has_spoken_is_not(meshes: list[Mesh]) -> None:
    meshes[2].send({0: {"call": 1}}, within(SOON))
    with pytest.raises(TimeoutError, match="rank 1 did not come in time") as caught:
        meshes[0].recv([1, 2], within(AT_ONCE))
    assert "rank 2" not in str(caught.value)


def test_a_tensor_that_came_while_another_rank_was_waited_for_is_not_lost(meshes: list[Mesh]) -> None:
    sent = torch.arange(5.0)
    meshes[1].send({0: {"call": "send"}}, within(SOON))
    meshes[1].exchange([(sent, 0)], [], within(SOON))
    with pytest.raises(TimeoutError):
        meshes[0].recv([1, 2], within(AT_ONCE))
    got = torch.empty(5)
    meshes[0].exchange([], [(got, 1)], within(SOON))
    assert_same(sent, got)


def test_many_tensors_go_both_ways_at_once(meshes: list[Mesh], pipes: Any) -> None:
    large = torch.arange(1 << 20)
    sends = [(large + number, 1) for number in range(3)]
    transfers = [pipes[0][1].send_tensor(tensor) for tensor, _ in sends]
    got = [torch.empty_like(large) for _ in sends]
    meshes[1].exchange([], [(tensor, 0) for tensor in got], within(SOON))
    for transfer in transfers:
        transfer.wait(SOON)
    assert all(torch.equal(tensor, sent) for tensor, (sent, _) in zip(got, sends, strict=True))


def test_who_leaves_an_exchange_does_not_cut_off_those_who_are_in_it(meshes: list[Mesh]) -> None:
    large, got = torch.arange(1 << 21), torch.empty(1 << 21, dtype=torch.int64)
    meshes[0].abort()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(meshes[2].exchange, [], [(got, 1)], within(SOON))
        with pytest.raises(PeerGoneError, match="rank 0 is gone"):
            meshes[1].exchange([(large, 2)], [(torch.empty(3), 0)], within(SOON))
        receiving.result(SOON)
    assert_same(large, got)


@pytest.mark.parametrize("kind", [TimeoutError, PeerGoneError, TransportError])
def test_why_a_rank_gave_up_is_raised_at_the_others_in_its_kind(meshes: list[Mesh], kind: type) -> None:
    meshes[1].give_up(kind("rank 2 did not come"))
    for call in (
        lambda: meshes[0].check(),
        lambda: meshes[0].recv([2], within(SOON)),
        lambda: meshes[0].recv([1], within(SOON)),
    ):
        with pytest.raises(kind, match="rank 1 has given up: rank 2 did not come"):
            call()


def test_why_a_rank_gave_up_is_one_printable_line(meshes: list[Mesh], pipes: Any) -> None:
    announce(pipes[1][0], ["ended", "TimeoutError", "no room\n\x1b[2J" + "x" * 100_000, ""])
    with pytest.raises(TimeoutError, match="rank 1 has given up: no room") as caught:
        meshes[0].check()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "news", [None, 7, [], ["ended"], ["ended", 7, 8], ["left", -1], ["left", "x"], {"a": torch.ones(2)}]
)
def test_news_that_cannot_be_are_no_crash(meshes: list[Mesh], pipes: Any, news: Any) -> None:
    announce(pipes[1][0], news)
    with pytest.raises((TransportError, WireError, PeerGoneError)):
        for _ in range(3):
            meshes[0].check()
        meshes[1].abort()
        meshes[0].recv([1], within(SOON))


def test_an_error_of_another_kind_is_a_transports(meshes: list[Mesh]) -> None:
    meshes[1].give_up(KeyError("no such page"))
    with pytest.raises(TransportError, match="rank 1 has given up: 'no such page'"):
        meshes[0].check()


def test_what_a_rank_lacks_is_named_at_the_others(meshes: list[Mesh]) -> None:
    meshes[1].give_up(MemoryError())
    with pytest.raises(ResourceExhaustedError, match=r"rank 1 has given up: .*memory") as caught:
        meshes[0].check()
    assert caught.value.resource == "memory"


def test_news_come_instead_of_a_tensor_that_was_announced(meshes: list[Mesh]) -> None:
    meshes[1].give_up()
    meshes[1].give_up(TimeoutError("it took too long"))
    with pytest.raises(TimeoutError, match="rank 1 has given up: it took too long"):
        meshes[0].exchange([], [(torch.empty(3, dtype=torch.uint8), 1)], within(SOON))


def test_news_are_heard_of_a_rank_that_takes_nothing_more(meshes: list[Mesh]) -> None:
    meshes[1].give_up(PeerGoneError("rank 2 is gone"))
    meshes[1].abort()
    with pytest.raises(PeerGoneError, match="rank 1 has given up: rank 2 is gone"):
        for _ in range(1000):
            meshes[0].send({1: {"call": 1}}, within(SOON))


def test_whoever_has_not_given_up_when_all_others_have_is_to_blame(meshes: list[Mesh]) -> None:
    meshes[1].give_up()
    assert meshes[0].silent(within(AT_ONCE), reason_wanted=False) == [2]
    meshes[2].give_up()
    assert meshes[0].silent(within(SOON), reason_wanted=False) == []
    assert meshes[0].silent(within(AT_ONCE), reason_wanted=True) == []
    meshes[2].give_up(TimeoutError("of rank 5"))
    with pytest.raises(TimeoutError, match="rank 2 has given up: of rank 5"):
        meshes[0].silent(within(SOON), reason_wanted=True)


def test_a_rank_that_is_gone_is_named_whoever_is_waited_for(meshes: list[Mesh]) -> None:
    meshes[2].abort()
    for call in (
        lambda: meshes[0].recv([1], within(SOON)),
        lambda: meshes[0].check(),
        lambda: meshes[0].silent(within(SOON), reason_wanted=False),
    ):
        with pytest.raises(PeerGoneError, match="rank 2 is gone"):
            call()


def test_after_its_own_end_everything_is_closed(meshes: list[Mesh]) -> None:
    meshes[0].abort()
    with pytest.raises(ClosedError):
        meshes[0].recv([1], within(SOON))
    with pytest.raises(ClosedError):
        meshes[0].send({1: {}}, within(SOON))
    with pytest.raises(ClosedError):
        meshes[0].check()


def test_a_tensor_is_no_call(meshes: list[Mesh]) -> None:
    meshes[1].exchange([(torch.ones(2), 0)], [], within(SOON))
    with pytest.raises(WireError):
        meshes[0].recv([1], within(SOON))


def test_calls_that_are_compared_come_in_the_order_of_ranks(meshes: list[Mesh]) -> None:
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(mesh.compare, {"rank": rank}, within(SOON)) for rank, mesh in enumerate(meshes)]
        assert [call.result(SOON) for call in calls] == [[{"rank": rank} for rank in range(3)]] * 3


def test_a_library_that_is_late_or_fails_is_judged_by_who_answers(meshes: list[Mesh]) -> None:
    meshes[1].give_up()
    with (
        pytest.raises(TimeoutError, match="rank 2 began a collective, did not go on, and does not answer"),
        meshes[0].diagnose(),
    ):
        raise TimeoutError("too late")


def test_only_ranks_that_take_part_are_to_blame(meshes: list[Mesh]) -> None:
    meshes[1].give_up()
    with pytest.raises(TimeoutError, match="too late"), meshes[0].diagnose([1]):
        raise TimeoutError("too late")


def test_a_rank_that_is_gone_is_why_the_library_failed(meshes: list[Mesh]) -> None:
    meshes[2].abort()
    with pytest.raises(PeerGoneError, match="rank 2 is gone"), meshes[0].diagnose():
        raise TransportError("a connection broke")


def test_whoever_knows_why_the_library_failed_tells_the_others_at_once(meshes: list[Mesh]) -> None:
    meshes[0].give_up()
    meshes[2].give_up()
    with pytest.raises(TimeoutError, match="too late; every rank is there"), meshes[1].diagnose():
        raise TimeoutError("too late")
    meshes[1].give_up(TransportError("said once is said"))
    with pytest.raises(TimeoutError, match="rank 1 has given up: too late"):
        meshes[2].silent(within(SOON), reason_wanted=True)


def test_an_error_of_a_ranks_own_is_raised_whatever_others_take_for_the_reason(meshes: list[Mesh]) -> None:
    meshes[1].give_up(TransportError("rank 0 failed"))
    with pytest.raises(OwnError, match="the device failed"), meshes[0].diagnose(own=(OwnError,)):
        raise OwnError("the device failed")


def test_nobody_who_is_silent_is_blamed_for_an_error_of_a_ranks_own(meshes: list[Mesh]) -> None:
    with pytest.raises(OwnError, match="the device failed"), meshes[0].diagnose(own=(OwnError,)):
        raise OwnError("the device failed")
    with pytest.raises(TransportError, match="rank 0 has given up: the device failed"):
        meshes[2].silent(within(SOON), reason_wanted=True)


def test_a_rank_that_is_gone_may_be_behind_an_error_of_ones_own(meshes: list[Mesh]) -> None:
    meshes[2].abort()
    with pytest.raises(PeerGoneError, match="rank 2 is gone"), meshes[0].diagnose(own=(OwnError,)):
        raise OwnError("a connection broke")
