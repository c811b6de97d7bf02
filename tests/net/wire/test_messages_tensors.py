"""Which memory a message is received into as it is. What fits is judged by the kit's suite of pipes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvplug.net.wire.messages import is_dense  # noqa: E402 - after the skip


def test_dense_is_what_lies_as_it_is_sent() -> None:
    assert is_dense(torch.empty(3, 5))
    assert is_dense(torch.empty(()))
    assert not is_dense(torch.empty(5, 3).t())
    assert not is_dense(torch.empty(3, dtype=torch.complex64).conj())
    assert not is_dense(torch.empty(3, dtype=torch.complex64).conj().imag)
