"""The lookup buffer "memory" keeps the laws; and what it takes for a key."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.errors import UnsupportedError
from kvplug_testing import LookupBufferContract
from kvplug_testing.memory.entries import checked_tokens, extra_bytes, key_under


@pytest.mark.full
class TestMemory(LookupBufferContract):
    transport = "memory"
    across_processes = False


@pytest.mark.parametrize("tokens", [[1.5], [True], [1 << 63], [[1], [2]], "12", 5, [None]])
def test_what_is_no_row_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        checked_tokens(tokens, None)


@pytest.mark.parametrize(
    ("roi", "error"), [([1, 0], UnsupportedError), ([True], ValueError), ([[True, False]], ValueError)]
)
def test_what_is_no_roi_of_two_tokens_is_refused(roi: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        checked_tokens([1, 2], roi)


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
