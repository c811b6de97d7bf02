"""The lookup buffer "memory" keeps the laws; and how its entries are found."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvplug.errors import UnsupportedError
from kvplug.testing import LookupBufferContract
from kvplug.testing.memory.tokens import TokenTree, extra_bytes, key_under, roi_mask, token_ids


class TestMemory(LookupBufferContract):
    transport = "memory"


def test_a_tree_that_is_emptied_keeps_no_node() -> None:
    tree, held, order = TokenTree(), {}, random.Random(3)
    for entry_id in range(200):
        held[entry_id] = tuple(order.choices((1, 2, 3), k=order.randrange(1, 6)))
        tree.add(entry_id, held[entry_id])
    for entry_id in order.sample(sorted(held), len(held)):
        tree.keep(entry_id, held[entry_id])
        assert tree.longest(held[entry_id])[0] == len(held[entry_id])
        tree.remove(entry_id, held[entry_id])
    assert tree.oldest() is None
    assert tree.longest((1, 2, 3)) == (0, None)
    assert not tree._root.children


@pytest.mark.parametrize("tokens", [[1.5], [True], [1 << 63], [[1], [2]], "12", 5, [None]])
def test_what_is_no_row_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        token_ids(tokens)


@pytest.mark.parametrize(
    ("roi", "error"), [([1, 0], UnsupportedError), ([True], ValueError), ([[True, False]], ValueError)]
)
def test_what_is_no_roi_of_two_tokens_is_refused(roi: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        roi_mask(roi, 2)


def test_tensors_and_arrays_mean_what_lists_mean() -> None:
    import numpy as np
    import torch

    for tokens, roi in (
        (torch.tensor([1, 2, 3]), torch.tensor([True, False, True])),
        (np.array([1, 2, 3], dtype=np.uint16), np.array([True, False, True])),
        ((np.int64(1), 2, 3), [np.bool_(True), False, True]),
    ):
        assert key_under(tokens, roi) == (1, 3)


@pytest.mark.parametrize("extra", ["text", 3, None])
def test_an_extra_that_is_not_bytes_is_refused(extra: Any) -> None:
    with pytest.raises(UnsupportedError, match="extra must be bytes"):
        extra_bytes(extra)
