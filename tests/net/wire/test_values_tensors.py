"""Tensors, dtypes and numpy arrays as values: whole, or with memories out of band of the head."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from kvplug.errors import UnsupportedError, WireError  # noqa: E402 - after the skip
from kvplug.net.wire import (  # noqa: E402
    OutOfBand,
    TensorMeta,
    aligned,
    decode,
    decode_out_of_band,
    empty_like_meta,
    encode,
    encode_out_of_band,
    memory_of,
    meta_of,
)
from kvplug.net.wire.tensors import DTYPES  # noqa: E402
from kvplug_testing.comparison import assert_same  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]

ARRAYS = ["bool", "uint8", "int16", "uint64", "float16", "float64", "complex64"]


def back_to_back(parted: OutOfBand, padding: bytes = b"\xee") -> memoryview:
    """Its memories as a transport lays them; what lies between them means nothing."""
    lying = bytearray(padding * parted.nbytes)
    at = 0
    for memory in parted.memories:
        lying[at : at + memory.nbytes] = memory
        at += aligned(memory.nbytes)
    assert at == parted.nbytes == len(lying)
    return memoryview(lying).toreadonly()


def crossed(value: Any, min_bytes: int = 0, **given: Any) -> Any:
    parted = encode_out_of_band(value, min_bytes=min_bytes)
    return decode_out_of_band(parted.head, back_to_back(parted), **given)


WAYS: dict[str, Callable[[Any], Any]] = {"whole": lambda value: decode(encode(value)), "out of band": crossed}
both_ways = pytest.mark.parametrize("cross", WAYS.values(), ids=WAYS)


def tensor_of(name: str, *shape: int) -> Any:
    meta = TensorMeta(name, shape)
    raw = torch.arange(meta.nbytes, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    return raw.view(getattr(torch, name)).view(shape)


@both_ways
@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_every_dtype_comes_back_bit_by_bit_and_the_dtype_as_itself(name: str, cross: Any) -> None:
    dtype, tensor = getattr(torch, name), tensor_of(name, 2, 3)
    for it in (tensor, tensor.t(), tensor[0, 0], tensor[:0]):
        found = cross({"t": [it]})["t"][0]
        assert type(found) is torch.Tensor and found.dtype == it.dtype and found.shape == it.shape
        assert bytes(memory_of(found)) == bytes(memory_of(it)) and found.is_contiguous()
    assert cross([dtype])[0] is dtype
    assert cross({dtype: {dtype}}) == {dtype: {dtype}}


@both_ways
@pytest.mark.parametrize("name", ARRAYS)
def test_a_numpy_array_comes_back_writable_and_equal(name: str, cross: Any) -> None:
    for array in (np.arange(6).astype(name).reshape(2, 3), np.zeros((), name), np.zeros((0, 2), name)):
        for it in (array, array.T):
            found = cross((it,))[0]
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
    value = {"k": [torch.ones(9000), make()]}
    with pytest.raises(UnsupportedError, match=rf"value\['k'\]\[1\]: .*{named}") as refusal:
        encode(value)
    with pytest.raises(UnsupportedError) as same:
        encode_out_of_band(value)
    assert str(same.value) == str(refusal.value)


def test_what_came_never_shares_memory_with_what_it_came_from() -> None:
    value = [torch.ones(5000), np.ones(5000)]
    whole, parted = bytearray(encode(value)), encode_out_of_band(value)
    lying = bytearray(back_to_back(parted))
    found = [decode(whole), decode_out_of_band(parted.head, memoryview(lying))]
    for buffer in (whole, lying):
        buffer[:] = bytes(len(buffer))
        buffer.append(1)  # and holds none of it
    for each in found:
        assert_same(value, each)
        each[0] += 1


def test_an_array_of_a_dtype_that_numpy_lacks_is_a_wire_error() -> None:
    data = bytearray(encode(torch.zeros(0, dtype=torch.bfloat16)))
    assert data[2] == 17
    data[2] = 18
    with pytest.raises(WireError, match="numpy has no dtype bfloat16"):
        decode(data)


@pytest.mark.parametrize(
    ("missing", "make"),
    [("torch", lambda: torch.int8), ("torch", lambda: torch.ones(1)), ("numpy", lambda: np.ones(1))],
)
def test_without_the_library_the_error_of_decoding_names_it(
    missing: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parted = encode(make()), encode_out_of_band(make(), min_bytes=0)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(WireError, match=f"{missing}.*not installed"):
        decode(whole)
    with pytest.raises(WireError, match=f"{missing}.*not installed"):
        decode_out_of_band(parted.head, back_to_back(parted))


# -- what is out of band -----------------------------------------------------------------------------


def test_no_byte_is_copied_to_be_sent_unless_it_does_not_lie_in_order() -> None:
    tensor, array = torch.zeros(5000), np.zeros(5000)
    read_only = np.zeros(5000)
    read_only.flags.writeable = False
    memories = encode_out_of_band([tensor, array, read_only, tensor.view(50, 100).t()]).memories
    tensor[0], array[0] = 1, 2
    assert memories[0][:4] == memory_of(torch.ones(1)) and memories[1][:8] == np.full(1, 2.0).tobytes()
    assert bytes(memories[2]) == bytes(40_000)
    assert bytes(memories[3]) == bytes(20_000)  # it lies elsewhere: a copy, made before


def test_every_tensor_that_is_out_of_band_is_received_into_what_is_made_for_it_and_no_array_is() -> None:
    value = [torch.ones(2000), {"k": (np.ones(3), torch.zeros(2, 2, dtype=torch.int8).t())}]
    made = []

    def make(meta: TensorMeta) -> Any:
        made.append(empty_like_meta(meta))
        return made[-1]

    for min_bytes, count in ((0, 2), (8000, 1), (8001, 0)):  # the larger tensor has 8000 bytes
        made.clear()
        found = crossed(value, min_bytes, make=make)
        assert encode(found) == encode(value)
        assert len(made) == count and (not made or found[0] is made[0])
        assert list(map(meta_of, made)) == [meta_of(value[0]), meta_of(value[1]["k"][1])][:count]
    whole = torch.zeros(4, 6)
    found = crossed(torch.ones(4, 2), make=lambda meta: whole[:, 1:3])
    assert found.data_ptr() == whole[:, 1:3].data_ptr() and whole.sum() == 8, "made with gaps"
