"""What ranks tell each other before a collective: pure, and without torch."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug import UnsupportedError
from kvplug.transport import TensorMismatchError
from kvplug.transport.communicator.calls import (
    check_dim,
    check_divisible,
    check_fillable,
    check_paired,
    check_same,
    check_sum,
    describe,
    dtype_name,
    paired,
)


@attrs.frozen
class Shape:
    """As much of a tensor as is described."""

    shape: tuple[int, ...]
    dtype: str = "torch.float32"


def said(*shape: int, **given: Any) -> dict[str, Any]:
    return describe(Shape(shape), **{"rank": 0, "world_size": 2, **given})  # type: ignore[arg-type]


def test_a_dtype_has_one_name() -> None:
    assert dtype_name("torch.bfloat16") == dtype_name("bfloat16") == "bfloat16"


def test_what_is_described_is_plain_and_counts_dimensions_from_the_front() -> None:
    assert said(2, 3) == {"dtype": "float32", "shape": [2, 3]}
    assert said(2, 3, dim=-1, root=1) == {"dtype": "float32", "shape": [2, 3], "dim": 1, "root": 1}


def test_where_sizes_vary_by_rank_the_descriptions_are_the_same() -> None:
    sizes = [2, 5]
    near = said(2, 3, dim=0, sizes=sizes, vary=True)
    assert near == said(5, 3, dim=-2, sizes=sizes, vary=True, rank=1)
    assert near != said(5, 4, dim=0, sizes=sizes, vary=True, rank=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dim": 2}, r"dimension 2 of a tensor of shape \[2, 3\] is not there"),
        ({"dim": -3}, "dimension -3"),
        ({"dim": 0, "sizes": [2]}, "2 numbers, one for each rank, are wanted"),
        ({"dim": 0, "sizes": [2, -1]}, "are wanted"),
        ({"dim": 0, "sizes": 2}, "sizes=2 was given"),
        ({"dim": 0, "sizes": [3, 2], "vary": True}, r"has 2 elements at rank 0, and sizes \[3, 2\] say 3"),
    ],
)
def test_what_does_not_fit_says_what_was_given_and_what_was_wanted(given: Any, words: str) -> None:
    with pytest.raises(TensorMismatchError, match=words):
        said(2, 3, **given)


def test_parts_must_come_out_even_or_add_up() -> None:
    check_divisible(6, 0, 3)
    check_sum(6, 0, [1, 5])
    with pytest.raises(TensorMismatchError, match="7 elements, and 3 ranks"):
        check_divisible(7, 0, 3)
    with pytest.raises(TensorMismatchError, match="add up to 7, and dimension 1 has 6"):
        check_sum(6, 1, [2, 5])


def test_ranks_that_differ_are_all_quoted_by_their_numbers() -> None:
    check_same("all_reduce", [{"call": "all_reduce", "shape": [2]}] * 3)
    calls = [{"call": "all_reduce", "shape": [2]}, {"call": "all_gather", "shape": [2], "dim": 0}]
    with pytest.raises(TensorMismatchError) as caught:
        check_same("all_reduce", calls, [4, 7])
    assert "rank 4: all_reduce with shape [2]" in str(caught.value)
    assert "rank 7: all_gather with shape [2], dim 0" in str(caught.value)


def test_a_refusal_counts_even_where_all_refuse_in_the_same_words() -> None:
    refused = {"call": "all_reduce", "refused": "a bool tensor was given"}
    with pytest.raises(TensorMismatchError, match="rank 1: all_reduce, refused there: a bool tensor"):
        check_same("all_reduce", [refused, refused])


@pytest.mark.parametrize("dim", [None, 0.5, "0", True])
def test_a_dimension_is_a_number(dim: object) -> None:
    check_dim(-1)
    with pytest.raises(TensorMismatchError, match="the number of a dimension is wanted"):
        check_dim(dim)


@attrs.frozen
class Laid:
    """As much of a tensor as says where its elements are."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def stride(self) -> tuple[int, ...]:
        return self.steps


def test_what_is_filled_has_memory_for_each_element() -> None:
    for fine in (Laid((), ()), Laid((2, 3), (3, 1)), Laid((1, 3), (0, 1)), Laid((3, 2), (1, 3))):
        check_fillable(fine)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"shape \[2, 3\] .*clone"):
        check_fillable(Laid((2, 3), (0, 1)))  # type: ignore[arg-type]


def test_who_is_in_a_collective_neither_sends_nor_receives() -> None:
    check_paired(0, {1: paired(["float32 [2]"], [])}, {1: paired([], ["float32 [2]"])})
    with pytest.raises(TensorMismatchError, match="rank 1: all_reduce with shape"):
        check_paired(0, {1: paired([], [])}, {1: {"call": "all_reduce", "shape": [2]}})
