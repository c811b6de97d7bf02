"""A difference is described by its first wrong byte, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvplug_testing.comparison import assert_filled, assert_same, difference


def test_the_first_wrong_byte_of_a_tensor_is_shown_with_dtype_and_shape() -> None:
    sent = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    got = sent.clone()
    got[1, 2] += 1
    assert difference(sent, got) == "int16 [3, 4]: byte 12 of 24 is 0x07, not 0x06"
    assert not difference(sent.t(), sent.clone().t())
    assert difference(sent.t(), got.t())


def test_bits_count_and_not_values() -> None:
    nan, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (-1, 0x7FC00000))
    assert not difference(nan, nan.clone())
    assert "is 0x00, not 0xff" in difference(nan, other)
    assert difference(torch.zeros(1), -torch.zeros(1))


@pytest.mark.parametrize(
    ("wanted", "got"),
    [(torch.ones(2, 3), torch.ones(3, 2)), (torch.ones(2), None), (torch.ones(2), [1.0, 1.0]), (True, 1)],
)
def test_another_dtype_shape_or_type_is_a_difference(wanted: Any, got: Any) -> None:
    assert "was expected" in difference(wanted, got)


def test_the_place_in_a_value_is_shown() -> None:
    one: Any = {"layers": [(torch.ones(3), b"x" * 70_000)], 7: "seven"}
    assert not difference(one, {7: "seven", **one})
    other: Any = {**one, "layers": [(torch.ones(3), b"x" * 69_999 + b"y")]}
    assert difference(one, other) == "at ['layers'][0][1], byte 69,999 of 70,000 is 0x79, not 0x78"
    assert difference([1, 2], [1])
    assert difference(b"ab", b"abc")


def test_the_error_begins_with_the_text_of_the_caller() -> None:
    assert_filled(3, torch.full((2, 2), 3.0))
    with pytest.raises(AssertionError, match=r"^at rank 2: 1 was expected, and 2 came$"):
        assert_same(1, 2, "at rank 2")
    with pytest.raises(AssertionError, match=r"^it was written to: uint8 \[3\]: byte 1 of 3 is 0x08"):
        assert_filled(7, torch.tensor([7, 8, 7], dtype=torch.uint8), "it was written to")
