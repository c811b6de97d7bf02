"""What differs is told by its first wrong byte, in one line, whatever the size of what is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvplug_testing.comparison import assert_filled, assert_same, difference, filled_like

MIB = 1 << 20


def changed(tensor: Any, *at: int) -> Any:
    """A copy with one other element."""
    other = tensor.clone()
    other[at] += 1
    return other


def test_the_first_wrong_byte_is_told_with_dtype_shape_element_and_values() -> None:
    sent = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    assert difference(sent, changed(sent, 1, 2)) == (
        "int16 [3, 4]: byte 12 of 24 is 0x07, not 0x06, in the element [1, 2]: 7, not 6"
    )
    flat = torch.arange(4, dtype=torch.uint8)
    assert difference(flat, changed(flat, 2)) == "uint8 [4]: byte 2 of 4 is 0x03, not 0x02: 3, not 2"


@pytest.mark.parametrize(
    "view",
    [lambda t: t, lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 5:], lambda t: t[:0]],
    ids=["contiguous", "transposed", "every other row", "columns", "empty"],
)
@pytest.mark.parametrize("shape", [(3, 700_001), (700_001, 3), (1, 2_000_003)], ids=str)
def test_what_has_several_parts_is_compared_to_its_last_byte(view: Any, shape: tuple[int, int]) -> None:
    sent = view(torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape))
    assert not difference(sent, sent.clone())
    if sent.numel():
        last = tuple(size - 1 for size in sent.shape)
        where = f"byte {sent.nbytes - 4:,} of {sent.nbytes:,} is"
        assert where in difference(sent, changed(sent, *last))


def test_another_dtype_shape_or_type_is_told() -> None:
    assert difference(torch.ones(2, 3), torch.ones(3, 2)) == (
        "float32 [2, 3] was expected, and float32 [3, 2] came"
    )
    assert difference(torch.ones(2), None) == "float32 [2] was expected, and None came"
    assert difference(torch.ones(2, dtype=torch.int32), [1, 1]) == ("int32 [2] was expected, and [1, 1] came")
    assert difference(True, 1) == "True was expected, and 1 came"
    assert not difference(None, None)


def test_in_a_value_the_place_is_told() -> None:
    numpy = pytest.importorskip("numpy")
    one: Any = {"layers": [(torch.ones(3), b"x" * 70_000)], "ids": numpy.arange(5), 7: "seven"}
    assert not difference(one, {7: "seven", **one})
    other: Any = {**one, "layers": [(torch.ones(3), b"x" * 69_999 + b"y")]}
    assert difference(one, other) == "at ['layers'][0][1], byte 69,999 of 70,000 is 0x79, not 0x78"
    other = {**one, "ids": numpy.arange(1, 6)}
    assert difference(one, other).startswith("at ['ids'], array of int64 [5]: byte 0 of 40 is 0x01, not 0x00")
    assert difference([1, 2], [1]) == "2 items were expected, and 1 came"
    assert difference(one, {**one, 8: "eight"}).endswith("came")
    assert difference(b"ab", b"abc") == "2 bytes were expected, and 3 came"


def test_what_comes_first_in_the_error_is_what_the_caller_says() -> None:
    assert_same([1], [1])
    assert_filled(3, torch.full((2, 2), 3.0))
    with pytest.raises(AssertionError, match=r"^at rank 2: 1 was expected, and 2 came$"):
        assert_same(1, 2, "at rank 2")
    with pytest.raises(AssertionError, match=r"^it was written to: uint8 \[3\]: byte 1 of 3 is 0x08"):
        assert_filled(7, torch.tensor([7, 8, 7], dtype=torch.uint8), "it was written to")
    assert filled_like(torch.empty(1 << 40, device="meta"), 1).untyped_storage().nbytes() == 4


# -- memory ----------------------------------------------------------------------------------------
