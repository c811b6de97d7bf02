"""Layouts and the arithmetic of blocks: without torch."""

from __future__ import annotations

import pytest

from kvplug.engine.layout import KVLayout
from kvplug.errors import LayoutError

SIZES = {"K": 2, "B": 5, "T": 4, "H": 3, "D": 6}


def layout_of(axes: str) -> KVLayout:
    return KVLayout(axes, {letter: SIZES[letter] for letter in axes})


class FakeTensor:
    """As much of a tensor as ``check`` looks at; contiguous unless strides are given."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self._strides = contiguous(shape) if strides is None else strides

    def stride(self) -> tuple[int, ...]:
        return self._strides


def check(layout: KVLayout, *tensor: tuple[int, ...]) -> None:
    layout.check(FakeTensor(*tensor))  # type: ignore[arg-type]


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


# -- axis strings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("KBTHD", (2, 5, 4, 3, 6)),
        ("BHTKD", (5, 3, 4, 12)),  # K directly before D: keys and values are packed
        ("BKDTH", (5, 12, 4, 3)),
        ("BHTDK", (5, 3, 4, 6, 2)),
        ("BTD", (5, 4, 6)),
    ],
)
def test_a_layout_knows_its_tensors_shape_takes_such_a_tensor(axes: str, shape: tuple[int, ...]) -> None:
    layout = layout_of(axes)
    assert layout.shape == shape
    check(layout, shape)


def test_a_layout_answers_for_its_sizes_and_latent_attention_has_one_head_and_no_values() -> None:
    layout = KVLayout("BHTKD", {"T": 16, "H": 3, "D": 64})
    assert (layout.block_size, layout.num_kv_heads, layout.head_size) == (16, 3, 64)
    assert (layout.num_blocks, layout.has_values, layout.is_packed) == (None, True, True)
    latent = KVLayout("BTD", {"T": 64, "D": 576})
    assert (latent.num_kv_heads, latent.has_values, latent.is_packed) == (1, False, False)
    with pytest.raises(LayoutError, match="number of blocks"):
        _ = latent.shape


@pytest.mark.parametrize(
    ("axes", "sizes", "said"),
    [
        ("", {}, "not an axis string"),
        ("KBTHX", {}, "'X'"),
        ("KBTHDD", {}, "repeats a letter"),
        ("KBHD", {"H": 1, "D": 1}, "lacks T"),
        ("KBTD", {"T": 1, "D": 1}, "only one of them"),
        ("KBTHD", {"T": 1, "D": 1}, "needs the sizes of H"),
        ("LBTD", {"L": 2, "T": 1, "D": 1}, "'L'"),
        ("BTD", {"T": 1, "D": 1, "H": 1}, "'H', which is not an axis"),
        ("KBTHD", {"T": 1, "H": 1, "D": 1, "K": 3}, "its size is 2, not 3"),
        ("BTD", {"T": 0, "D": 1}, "positive integer, got 0"),
        ("BTD", {"T": True, "D": 1}, "positive integer, got True"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_reason(axes: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        KVLayout(axes, sizes)


# -- checking a tensor -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shape", "strides", "said"),
    [
        ("KBTHD", (2, 5, 4, 4, 6), None, "axis H: .* expects 3, got 4"),
        ("BHTKD", (5, 3, 4, 6), None, "axis KD: .* expects 12, got 6"),
        ("BHTKD", (5, 3, 4, 2, 6), None, r"expects 4 dimensions \(B, H, T, KD\), got 5"),
        ("BTD", (5, 4, 6), (0, 6, 1), "axis B: .* stride of more than 23 elements, got 0"),
        ("BTD", (5, 4, 6), (12, 6, 1), "axis B: .* stride of more than 23 elements, got 12"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_the_name_of_its_axis(
    axes: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        check(layout_of(axes), shape, strides)  # type: ignore[arg-type]


def test_strides_in_another_order_are_refused_although_the_shape_fits() -> None:
    layout = KVLayout("KBTHD", {"B": 5, "T": 4, "H": 4, "D": 6})  # as many heads as tokens
    strides = contiguous(layout.shape)
    check(layout, layout.shape, strides)
    with pytest.raises(LayoutError, match=r"axis T: .*memory order KBHTD"):
        check(layout, layout.shape, (*strides[:2], strides[3], strides[2], strides[4]))
