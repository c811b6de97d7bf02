"""The bytes of tensors without a copy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplug.errors import UnsupportedError  # noqa: E402 - after the skip
from kvplug.net.wire.tensors import (  # noqa: E402
    DTYPES,
    TensorMeta,
    copy_into,
    dense,
    empty_like_meta,
    memory_of,
    memory_of_writable,
    meta_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def random_tensor(name: str, *shape: int) -> Any:
    meta = TensorMeta(name, shape)
    return torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8).view(getattr(torch, name)).view(shape)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_contiguous_memory_is_seen_in_place_and_filled_in_place(name: str) -> None:
    for shape in ((), (0,), (3, 0, 2), (5,), (2, 3, 4)):
        tensor = random_tensor(name, *shape)
        view = memory_of(tensor)
        meta = meta_of(tensor)
        assert meta == TensorMeta(name, shape) and meta.nbytes == view.nbytes == len(view)
        assert view.readonly and view.format == "B" and view.ndim == 1
        if meta.nbytes:
            assert torch.frombuffer(view, dtype=torch.uint8).data_ptr() == tensor.data_ptr()
        other = empty_like_meta(meta)
        assert other.dtype == tensor.dtype and other.shape == tensor.shape
        memory_of_writable(other)[:] = view
        assert bytes(memory_of(other)) == bytes(view)


@pytest.mark.parametrize("name", DTYPES)
def test_a_non_contiguous_source_is_read_and_a_target_filled_in_row_major_order(name: str) -> None:
    tensor = random_tensor(name, 4, 6).t()
    size = DTYPES[name][1]
    raw = bytes(memory_of(tensor.t()))
    expected = b"".join(raw[(6 * j + i) * size :][:size] for i in range(6) for j in range(4))
    assert bytes(memory_of(tensor)) == expected
    copied = dense(tensor)
    assert copied.is_contiguous() and bytes(memory_of(copied)) == expected
    assert dense(tensor.t()).data_ptr() == tensor.data_ptr(), "what is dense is not copied"
    target = random_tensor(name, 4, 6).t()
    copy_into(target, memory_of(tensor))
    assert bytes(memory_of(target.t())) == raw
    with pytest.raises(UnsupportedError, match="contiguous"):
        memory_of_writable(tensor)


def test_a_gap_between_rows_is_left_alone_and_another_number_of_bytes_is_refused() -> None:
    whole = torch.zeros(4, 6, dtype=torch.bfloat16)
    copy_into(whole[:, 1:3], bytes([1]) * 16)
    assert whole[:, 0].eq(0).all() and whole[:, 3:].eq(0).all() and whole[:, 1:3].ne(0).all()
    with pytest.raises(ValueError, match="7 bytes do not match"):
        copy_into(torch.zeros(2), bytes(7))


def test_views_that_torch_computes_lazily_are_resolved() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    assert bytes(memory_of(z.conj())) == bytes(memory_of(z.conj().resolve_conj()))
    assert torch.equal(dense(z.conj()).view(torch.complex64), z.conj().resolve_conj())
    imaginary = z.conj().imag
    assert imaginary.is_neg()
    assert bytes(memory_of(imaginary)) == bytes(memory_of((-z.imag).contiguous()))
    target = torch.zeros(5, dtype=torch.complex64).conj()
    copy_into(target, memory_of(z))
    assert torch.equal(target, z)
    with pytest.raises(UnsupportedError):
        memory_of_writable(target)


def test_the_view_keeps_the_memory_also_of_a_tensor_that_is_given_another_one_and_lets_it_go() -> None:
    tensor = torch.full((2**22,), 7, dtype=torch.uint8)
    memory = weakref.ref(tensor.untyped_storage())
    view = memory_of(tensor)
    tensor.data = torch.zeros(1, dtype=torch.uint8)
    gc.collect()
    assert memory() is not None and view[2**22 - 1] == 7
    del view
    gc.collect()
    assert memory() is None
