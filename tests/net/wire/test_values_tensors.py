"""Tensors, dtypes and numpy arrays as values."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from kvplug.errors import UnsupportedError, WireError  # noqa: E402 - after the skip
from kvplug.net.wire.tensors import DTYPES, memory_of  # noqa: E402
from kvplug.net.wire.values import decode, encode  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def same(a: Any, b: Any) -> bool:
    return (
        type(a) is type(b)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(memory_of(a)) == bytes(memory_of(b))
    )


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_every_dtype_comes_back_bit_by_bit(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.randint(0, 256, (6 * DTYPES[name][1],), dtype=torch.uint8).view(dtype).view(2, 3)
    for it in (tensor, tensor.t(), tensor[0, 0], tensor[:0]):
        assert same(decode(encode({"t": [it]}))["t"][0], it)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_as_itself_also_as_a_key(name: str) -> None:
    dtype = getattr(torch, name)
    assert decode(encode([dtype]))[0] is dtype
    assert decode(encode({dtype: {dtype}})) == {dtype: {dtype}}


@pytest.mark.parametrize("name", ["bool", "uint8", "int16", "uint64", "float16", "float64", "complex64"])
def test_a_numpy_array_comes_back_writable_and_equal(name: str) -> None:
    for array in (np.arange(6).astype(name).reshape(2, 3), np.zeros((), name), np.zeros((0, 2), name)):
        for it in (array, array.T):
            found = decode(encode((it,)))[0]
            assert type(found) is np.ndarray and found.dtype == it.dtype and found.shape == it.shape
            assert found.tobytes() == it.tobytes() and found.flags.writeable


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "qint8"),
        (lambda: torch.qint8, "qint8"),
        (lambda: torch.ones(2).to_sparse(), "dense"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.nn.Parameter(torch.ones(2)), "Parameter"),
        (lambda: np.float32(1), "float32"),
        (lambda: np.array(["text"]), "<U4"),
        (lambda: np.array([object()]), "object"),
        (lambda: np.zeros(2, ">i4"), ">i4"),
        (lambda: np.zeros(2, "M8[s]"), "datetime64"),
        (lambda: np.ma.masked_array([1]), "MaskedArray"),
    ],
)
def test_a_tensor_or_array_of_another_kind_is_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"value\['k'\]: .*{named}"):
        encode({"k": make()})


def test_a_tensor_never_shares_memory_with_the_message() -> None:
    data = bytearray(encode(torch.ones(4)))
    tensor = decode(data)
    data[:] = bytes(len(data))
    assert tensor.tolist() == [1, 1, 1, 1]
    tensor += 1


def test_as_many_dimensions_as_are_allowed_come_back() -> None:
    assert decode(encode(torch.zeros((1,) * 64, dtype=torch.int8))).dim() == 64


def test_an_array_of_a_dtype_that_numpy_lacks_is_a_wire_error() -> None:
    data = bytearray(encode(torch.zeros(0, dtype=torch.bfloat16)))
    assert data[2] == 17
    data[2] = 18
    with pytest.raises(WireError, match="numpy has no dtype bfloat16"):
        decode(data)


def test_encoding_plain_values_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from kvplug.net.wire import frames, values, tensors;"
        " values.decode(values.encode({'a': [(1, 2.0), {b'x'}]}));"
        " tensors.encode_meta(tensors.TensorMeta('bfloat16', (2,)));"
        " sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("missing", "code"), [("torch", 16), ("torch", 17), ("numpy", 18)])
def test_without_the_library_decoding_says_so(
    missing: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {16: encode(torch.int8), 17: encode(torch.ones(1)), 18: encode(np.ones(1))}[code]
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(WireError, match=f"{missing}.*not installed"):
        decode(data)
