"""What ranks exchange before a collective: pure, and without torch."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug.transport import TensorMismatchError, WireError
from kvplug.transport.communicator.calls import Call, check_paired, check_same, describe, paired


@attrs.frozen
class Shape:
    """As much of a tensor as is described."""

    shape: tuple[int, ...]
    dtype: str = "torch.float32"


def described(*shape: int, **given: Any) -> str:
    return describe(Shape(shape), **{"rank": 0, "world_size": 2, **given})  # type: ignore[arg-type]


def test_where_sizes_vary_by_rank_the_descriptions_are_the_same() -> None:
    sizes = [2, 5]
    near = described(2, 3, dim=0, sizes=sizes, vary=True)
    assert near == described(5, 3, dim=-2, sizes=sizes, vary=True, rank=1)
    assert near != described(5, 4, dim=0, sizes=sizes, vary=True, rank=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dim": 2}, r"a tensor of shape \[2, 3\] has no dimension 2"),
        ({"dim": -3}, "dimension -3"),
        ({"dim": 0, "sizes": [2]}, "2 numbers are needed, one for each rank"),
        ({"dim": 0, "sizes": [2, -1]}, "are needed"),
        ({"dim": 0, "sizes": 2}, "sizes=2 was given"),
        ({"dim": 0, "sizes": [3, 2], "vary": True}, "has 2 elements at rank 0, but should have 3"),
    ],
)
def test_the_error_for_what_does_not_fit_has_the_given_and_the_expected_value(given: Any, words: str) -> None:
    with pytest.raises(TensorMismatchError, match=words):
        described(2, 3, **given)


def test_ranks_that_differ_are_all_quoted_by_their_numbers() -> None:
    check_same("all_reduce", [Call("all_reduce", described(2))] * 3)
    calls = [Call("all_reduce", described(2)), Call("all_gather", described(2, dim=0))]
    with pytest.raises(TensorMismatchError) as caught:
        check_same("all_reduce", calls)
    assert "rank 0: all_reduce with dtype float32, shape [2]" in str(caught.value)
    assert "rank 1: all_gather with dtype float32, shape [2], dim 0" in str(caught.value)


def test_a_refusal_counts_even_where_all_refuse_in_the_same_words() -> None:
    refused = Call("all_reduce", refused="a bool tensor was given")
    with pytest.raises(TensorMismatchError, match="rank 1: all_reduce, refused there: a bool tensor"):
        check_same("all_reduce", [refused, refused])


def test_who_is_in_a_collective_neither_sends_nor_receives() -> None:
    ours, theirs = paired([described(2)], []), paired([], [described(2)])
    check_paired(0, {1: ours}, {1: theirs}, {1: theirs})
    with pytest.raises(TensorMismatchError, match="rank 1: all_reduce with dtype"):
        check_paired(0, {1: ours}, {1: theirs}, {1: Call("all_reduce", described(2))})


@pytest.mark.parametrize("sent", [None, 7, "a word", ["a"], b"", b"\xc1", b"\x80", b"\x81\xa4call\x07"])
def test_an_invalid_call_of_another_rank_is_refused(sent: Any) -> None:
    with pytest.raises(WireError):
        Call.decoded(1, sent)


def test_a_call_crosses_unchanged() -> None:
    for call in (Call("all_reduce", described(2), tokens=3), paired(["a"], []), Call("x")):
        assert Call.decoded(1, call.encoded()) == call
