"""What ranks say to each other beside a library: calls, tensors and news on one pipe, each in its order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from cpu_ends import make_endpoint
from kvplug import KvplugError, PeerGoneError, ResourceExhaustedError, TimeoutError, TransportError
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
def pipes() -> list[dict[int, Any]]:
    """Of three ranks: to each other one."""
    pipes: list[dict[int, Any]] = [{}, {}, {}]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        end = make_endpoint()
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


# -- calls and tensors -----------------------------------------------------------------------------


def test_only_ranks_that_have_said_nothing_are_named_and_what_came_meanwhile_is_not_lost(
    meshes: list[Mesh],
) -> None:
    sent, got = torch.arange(5.0), torch.empty(5)
    meshes[1].send({0: b"send"}, within(SOON))
    meshes[1].exchange([(sent, 0)], [], within(SOON))
    with pytest.raises(TimeoutError, match="rank 2 sent no call in time") as caught:
        meshes[0].recv([1, 2], within(AT_ONCE))
    assert "rank 1" not in str(caught.value)
    meshes[0].exchange([], [(got, 1)], within(SOON))
    assert_same(sent, got)


def test_who_leaves_an_exchange_does_not_cut_off_those_who_are_in_it(meshes: list[Mesh]) -> None:
    large, got = torch.arange(1 << 21), torch.empty(1 << 21, dtype=torch.int64)
    meshes[0].abort()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(meshes[2].exchange, [], [(got, 1)], within(SOON))
        with pytest.raises(PeerGoneError, match="rank 0 is gone"):
            meshes[1].exchange([(large, 2)], [(torch.empty(3), 0)], within(SOON))
        receiving.result(SOON)
    assert_same(large, got)


def test_a_tensor_is_no_call(meshes: list[Mesh]) -> None:
    meshes[1].exchange([(torch.ones(2), 0)], [], within(SOON))
    with pytest.raises(WireError):
        meshes[0].recv([1], within(SOON))


# -- news ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "kind", "text"),
    [
        (TimeoutError("rank 2 did not come"), TimeoutError, "rank 2 did not come"),
        (KeyError("no such page"), TransportError, r"KeyError\('no such page'\)"),
        (KeyboardInterrupt(), TransportError, r"KeyboardInterrupt\(\)"),
        (MemoryError(), ResourceExhaustedError, ".*memory"),
    ],
    ids=repr,
)
def test_why_a_rank_gave_up_is_raised_at_the_others_in_its_kind(
    meshes: list[Mesh], why: BaseException, kind: type[Exception], text: str
) -> None:
    meshes[1].give_up(why)
    for call in (
        lambda: meshes[0].check(),
        lambda: meshes[0].recv([2], within(SOON)),
        lambda: meshes[0].recv([1], within(SOON)),
    ):
        with pytest.raises(kind, match=f"rank 1 has given up: {text}") as caught:
            call()
        assert getattr(caught.value, "resource", "memory") == "memory"


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


# -- whose fault it is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "error", "kind", "text"),
    [
        (["stops"], TimeoutError("late"), TimeoutError, "rank 2 began a collective, did not finish it"),
        (["stops", "stops"], TimeoutError("late"), TimeoutError, "late; all ranks answer"),
        (["", "leaves"], TransportError("a connection broke"), PeerGoneError, "rank 2 is gone"),
        (["fails"], OwnError("the device failed"), OwnError, "the device failed"),
    ],
)
def test_a_failure_of_the_library_is_judged_by_who_answers_and_the_others_get_the_verdict_at_once(
    meshes: list[Mesh], others: list[str], error: TransportError, kind: type[TransportError], text: str
) -> None:
    for mesh, does in zip(meshes[1:], others, strict=False):
        match does:
            case "stops":
                mesh.give_up()
            case "fails":
                mesh.give_up(TransportError("rank 0 failed"))
            case "leaves":
                mesh.abort()
    with pytest.raises(kind, match=text), meshes[0].diagnose(None, own=(OwnError,)):
        raise error
    meshes[0].give_up(TransportError("only the first reason counts"))
    told = meshes[1 if "leaves" in others else 2]
    with pytest.raises(KvplugError, match=f"rank 0 has given up: {text}|rank 2 is gone|rank 0 failed"):
        told.silent(within(SOON), reason_wanted=True)
