"""Whether the memory that is offered for a message fits it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvplug.errors import TensorMismatchError, UnsupportedError  # noqa: E402 - after the skip
from kvplug.net.wire.messages import check_fits, is_dense, read_prefix, tensor_prefix  # noqa: E402
from kvplug.net.wire.tensors import meta_of  # noqa: E402


def test_a_tensors_prefix_says_its_meta() -> None:
    tensor = torch.empty(3, 5, dtype=torch.float16)
    prefix = tensor_prefix(tensor.dtype, tensor.shape, 30)
    assert read_prefix(prefix).meta == meta_of(tensor)


def test_what_has_the_shape_and_dtype_fits_dense_or_not() -> None:
    meta = meta_of(torch.empty(3, 5))
    for out in (torch.empty(3, 5), torch.empty(5, 3).t(), torch.empty(6, 5)[::2]):
        check_fits(out, meta)


def test_what_does_not_fit_is_told_both_shapes() -> None:
    meta = meta_of(torch.empty(3, 5))
    for out in (torch.empty(5, 3), torch.empty(15), torch.empty(3, 5, dtype=torch.float64)):
        with pytest.raises(TensorMismatchError, match=r"float32 of shape \[3, 5\], and out= is .*; it stays"):
            check_fits(out, meta)


def test_what_is_no_dense_cpu_tensor_is_refused() -> None:
    meta = meta_of(torch.empty(3, 3))
    for out in (torch.eye(3).to_sparse(), torch.empty(3, 3, device="meta"), [1.0] * 9):
        with pytest.raises(UnsupportedError, match="out= must be"):
            check_fits(out, meta)


def test_dense_is_what_lies_as_it_is_sent() -> None:
    assert is_dense(torch.empty(3, 5))
    assert is_dense(torch.empty(()))
    assert not is_dense(torch.empty(5, 3).t())
    assert not is_dense(torch.empty(3, dtype=torch.complex64).conj())
    assert not is_dense(torch.empty(3, dtype=torch.complex64).conj().imag)
