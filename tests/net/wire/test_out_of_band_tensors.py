"""Tensors and arrays whose memories are out of band of their value's head."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from kvplug.errors import CapacityError, UnsupportedError, WireError  # noqa: E402 - after the skip
from kvplug.net.wire import (  # noqa: E402
    ALIGNMENT,
    Limits,
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
NOTHING = memoryview(b"")


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


def tensor_of(name: str, *shape: int) -> Any:
    meta = TensorMeta(name, shape)
    raw = torch.arange(meta.nbytes, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    return raw.view(getattr(torch, name)).view(shape)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = tensor_of(draw(st.sampled_from(sorted(DTYPES))), *shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        return tensor.transpose(0, 1)
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    array = np.arange(np.prod(shape, dtype=int)).astype(draw(st.sampled_from(ARRAYS))).reshape(shape)
    return draw(st.sampled_from([array, array.T, array[..., ::2] if shape else array]))


VALUES = st.recursive(
    tensors() | arrays() | st.integers(0, 9) | st.binary(max_size=5) | st.sampled_from([torch.int8, None]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text("abc", max_size=2) | st.tuples(st.integers(0, 3)), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([0, 1, 32, 1 << 40]))
@settings(max_examples=2 * settings.default.max_examples)
def test_a_value_comes_back_as_from_its_whole_encoding_whatever_is_out_of_band(
    value: Any, min_bytes: int
) -> None:
    found = crossed(value, min_bytes)
    assert encode(found) == encode(value)  # types, dtypes, shapes and bytes, in the same order


@given(VALUES, st.integers(0, 100))
def test_what_has_as_many_bytes_as_wanted_is_out_of_band_and_nothing_else(value: Any, min_bytes: int) -> None:
    everything = encode_out_of_band(value, min_bytes=0).memories
    parted = encode_out_of_band(value, min_bytes=min_bytes)
    assert list(map(bytes, parted.memories)) == [bytes(m) for m in everything if m.nbytes >= min_bytes]
    assert all(m.readonly and m.format == "B" and m.ndim == 1 for m in parted.memories)
    assert len(encode(value)) <= len(parted.head) + sum(m.nbytes for m in parted.memories) + 10 * len(
        everything
    )


@given(VALUES, st.data())
def test_no_other_number_of_bytes_is_taken_for_the_memories(value: Any, data: st.DataObject) -> None:
    parted = encode_out_of_band(value, min_bytes=0)
    nbytes = data.draw(st.integers(0, parted.nbytes + 2 * ALIGNMENT).filter(lambda n: n != parted.nbytes))
    with pytest.raises(WireError, match=f"{parted.nbytes} bytes, and {nbytes} came"):
        decode_out_of_band(parted.head, memoryview(bytes(nbytes)))


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_every_dtype_comes_back_bit_by_bit(name: str) -> None:
    tensor = tensor_of(name, 2, 3)
    for it in (tensor, tensor.t(), tensor[0, 0], tensor[:0]):
        found = crossed({"t": [it]})["t"][0]
        assert type(found) is torch.Tensor and found.dtype == it.dtype and found.shape == it.shape
        assert bytes(memory_of(found)) == bytes(memory_of(it)) and found.is_contiguous()


@pytest.mark.parametrize("name", ARRAYS)
def test_a_numpy_array_comes_back_writable_and_equal(name: str) -> None:
    for array in (np.arange(6).astype(name).reshape(2, 3), np.zeros((), name), np.zeros((0, 2), name)):
        for it in (array, array.T):
            found = crossed((it,))[0]
            assert type(found) is np.ndarray and found.dtype == it.dtype and found.shape == it.shape
            assert found.tobytes() == it.tobytes() and found.flags.writeable and found.flags.owndata


def test_a_tensor_where_it_lies_in_a_set_or_a_key_keeps_its_place() -> None:
    first, second = torch.full((20,), 1.0), torch.full((30,), 2.0)
    ((key, member),) = crossed({(first, 7): frozenset({second})}).items()
    assert key[1] == 7 and torch.equal(key[0], first) and torch.equal(next(iter(member)), second)


def test_no_byte_is_copied_to_be_sent_unless_it_does_not_lie_in_order() -> None:
    tensor, array = torch.zeros(5000), np.zeros(5000)
    read_only = np.zeros(5000)
    read_only.flags.writeable = False
    memories = encode_out_of_band([tensor, array, read_only, tensor.view(50, 100).t()]).memories
    tensor[0], array[0] = 1, 2
    assert memories[0][:4] == memory_of(torch.ones(1)) and memories[1][:8] == np.full(1, 2.0).tobytes()
    assert bytes(memories[2]) == bytes(40_000)
    assert bytes(memories[3]) == bytes(20_000)  # it lies elsewhere: a copy, made before


def test_the_memories_keep_what_they_are_of_alive_and_let_it_go() -> None:
    tensor, array = torch.ones(5000), np.ones(5000)
    gone = weakref.ref(tensor), weakref.ref(array)
    parted = encode_out_of_band([tensor, array])
    del tensor, array
    gc.collect()
    assert parted.memories[0].nbytes == 20_000 and all(ref() is not None for ref in gone)
    del parted
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_what_came_never_shares_memory_with_what_it_came_from() -> None:
    parted = encode_out_of_band([torch.ones(5000), np.ones(5000)])
    lying = bytearray(back_to_back(parted))
    tensor, array = decode_out_of_band(parted.head, memoryview(lying))
    lying[:] = bytes(len(lying))
    assert_same([torch.ones(5000), np.ones(5000)], [tensor, array])
    lying.append(1)  # and holds none of it


def test_every_tensor_that_is_out_of_band_is_received_into_what_is_made_for_it_and_no_array_is() -> None:
    value = [torch.ones(2000), {"k": (np.ones(3), torch.zeros(2, 2, dtype=torch.int8).t())}]
    made = []

    def make(meta: TensorMeta) -> Any:
        made.append(empty_like_meta(meta))
        return made[-1]

    for min_bytes, count in ((0, 2), (4096, 1)):
        made.clear()
        found = crossed(value, min_bytes, make=make)
        assert encode(found) == encode(value)
        assert len(made) == count and found[0] is made[0]
        assert list(map(meta_of, made)) == [meta_of(value[0]), meta_of(value[1]["k"][1])][:count]


def test_a_tensor_that_is_made_with_gaps_is_filled_where_it_has_elements() -> None:
    whole = torch.zeros(4, 6)
    found = crossed(torch.ones(4, 2), make=lambda meta: whole[:, 1:3])
    assert found.data_ptr() == whole[:, 1:3].data_ptr() and whole.sum() == 8


def test_what_make_raises_reaches_the_caller_and_what_it_lacks_is_a_wire_error() -> None:
    def full(meta: TensorMeta) -> Any:
        raise CapacityError(f"no room for {meta.nbytes}")

    def without(meta: TensorMeta) -> Any:
        raise UnsupportedError(f"no {meta.dtype} here")

    with pytest.raises(CapacityError, match="no room for 20000"):
        crossed([torch.ones(5000)], make=full)
    with pytest.raises(WireError, match="cannot be made here: no float32 here"):
        crossed([torch.ones(5000)], make=without)


def test_the_bound_is_that_of_the_whole_encoding() -> None:
    value = {"kv": [torch.ones(1000), np.ones(1000, "u1")]}
    limits = Limits(max_bytes=len(encode(value)))
    parted = encode_out_of_band(value, min_bytes=0, limits=limits)
    assert encode(decode_out_of_band(parted.head, back_to_back(parted), limits=limits)) == encode(value)
    exact = len(parted.head) + 5000
    with pytest.raises(CapacityError, match=f"takes {exact} bytes, and at most {exact - 1} are sent"):
        encode_out_of_band(value, min_bytes=0, limits=Limits(max_bytes=exact - 1))
    with pytest.raises(WireError, match="tensors have 5000 bytes; at most 4999"):
        decode_out_of_band(parted.head, back_to_back(parted), limits=Limits(max_bytes=exact - 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: np.float32(1),
        lambda: np.array(["text"]),
        lambda: np.zeros(2, ">i4"),
        lambda: np.ma.masked_array([1]),
    ],
)
def test_a_tensor_or_array_of_another_kind_is_refused_with_the_same_words(make: Any) -> None:
    value = {"k": [torch.ones(9000), make()]}
    with pytest.raises(UnsupportedError) as refusal:
        encode(value)
    with pytest.raises(UnsupportedError) as same:
        encode_out_of_band(value)
    assert str(same.value) == str(refusal.value)


@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_without_the_library_decoding_says_so(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parted = encode_out_of_band({"torch": torch.ones(1), "numpy": np.ones(1)}[missing], min_bytes=0)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(WireError, match=f"{missing}.*not installed"):
        decode_out_of_band(parted.head, back_to_back(parted))


def test_a_whole_encoding_is_a_head_without_memories() -> None:
    value = [torch.ones(5000), np.ones(5000)]
    assert encode(decode_out_of_band(encode(value), NOTHING)) == encode(value)
    with pytest.raises(WireError, match="extension 19 is not accepted"):
        decode(encode_out_of_band(value).head)
