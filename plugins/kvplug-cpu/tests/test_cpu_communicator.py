"""Ranks of the communicator "cpu" that die or stop in the middle, and what is refused."""

from __future__ import annotations

import signal
from typing import Any

import pytest

import cpu_ranks
from communicator_ranks import at_all, check_joiners, check_survivors
from kvplug import ConfigError, StatelessGroup

STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)
RANKS = cpu_ranks.__file__


@pytest.mark.parametrize(
    ("method", "fault", "kind", "timeout", "world_size"),
    [
        ("all_reduce", KILL, "PeerGoneError", None, 3),
        ("all_reduce", STOP, "TimeoutError", 1.0, 4),
        ("batch_isend_irecv", STOP, "TimeoutError", 1.0, 3),
    ],
)
def test_a_rank_that_is_struck_in_the_middle_is_named_and_the_others_go_on_without_it(
    ranks: Any, method: str, fault: int, kind: str, timeout: float | None, world_size: int
) -> None:
    children = ranks("survivor", RANKS, world_size, {}, method, timeout, fault)
    check_survivors(
        children, kind, named=method != "batch_isend_irecv"
    )  # there a waiting one may be the first


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(
    ("when", "who", "fault", "kinds"),
    [
        ("pipes", 2, KILL, ["TimeoutError", "PeerGoneError"]),
        ("pipes", 2, STOP, ["TimeoutError"]),
    ],
)
def test_a_rank_that_is_struck_while_the_ranks_meet_is_named_in_time(
    ranks: Any, when: str, who: int, fault: int, kinds: list[str]
) -> None:
    check_joiners(ranks("joiner", RANKS, 3, {"timeout_s": 3.0}, fault, when, who), who, kinds, within=15.0)


# -- in threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "given", "kind", "words"),
    [
        (2, {"host": "203.0.113.1", "timeout_s": 5.0}, Exception, r"203\.0\.113\.1"),
        (1, {"device": "cuda:0"}, ConfigError, "takes CPU tensors, and the device is 'cuda:0'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    groups: Any, world_size: int, given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    def make(group: StatelessGroup) -> None:
        with pytest.raises(kind, match=words):
            cpu_ranks.make(group, **given)

    assert at_all(groups(world_size), make) == [None] * world_size
