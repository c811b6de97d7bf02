"""A group whose contact another group carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvplug import StatelessGroup, UnsupportedError
from kvplug.transport import WireError
from kvplug_testing.groups import local_groups


@pytest.fixture
def groups() -> Iterator[list[StatelessGroup]]:
    with local_groups(30.0) as make:
        yield make(3)


def at_all(groups: list[StatelessGroup], do: Callable[[StatelessGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(do, groups))


def test_a_group_of_the_same_ranks_lives_on_by_itself(groups: list[StatelessGroup]) -> None:
    made = at_all(groups, lambda group: StatelessGroup.from_process_group(group, timeout=30.0))
    for group in groups:
        group.abort()
    assert [(group.rank, group.world_size) for group in made] == [(0, 3), (1, 3), (2, 3)]
    assert at_all(made, lambda group: group.all_gather(group.rank)) == [[0, 1, 2]] * 3
    for group in made:
        group.abort()


def test_where_rank_0_cannot_listen_all_ranks_get_the_reason(groups: list[StatelessGroup]) -> None:
    def attempt(group: StatelessGroup) -> str:
        with pytest.raises(Exception, match="is not an address") as caught:
            StatelessGroup.from_process_group(group, "nowhere", timeout=30.0)
        return type(caught.value).__name__

    assert at_all(groups, attempt) == ["ConfigError", "TransportError", "TransportError"]


def test_something_else_than_a_contact_is_refused(groups: list[StatelessGroup]) -> None:
    groups[0].broadcast("a word", 0)
    with pytest.raises(WireError, match="did not send its contact"):
        StatelessGroup.from_process_group(groups[1], timeout=30.0)


def test_an_invalid_group_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"a kvplug\.StatelessGroup or a torch"):
        StatelessGroup.from_process_group("a word")  # type: ignore[arg-type]
