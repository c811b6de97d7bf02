"""Copies out of and into paged caches, against a reference that moves one element at a time."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

torch = pytest.importorskip("torch")

from kvplug.engine.layout import KVLayout, dimensions  # noqa: E402
from kvplug.errors import LayoutError  # noqa: E402  (torch decides first whether there is anything to test)

SIZES = {"K": 2, "B": 6, "T": 3, "H": 2, "D": 4}

KEYS_AND_VALUES, LATENT = (
    ["".join(order) for order in itertools.permutations(axes)] for axes in ("KBTHD", "BTD")
)
ALL = KEYS_AND_VALUES + LATENT


def layout_of(axes: str, **sizes: int) -> KVLayout:
    return KVLayout(axes, {letter: {**SIZES, **sizes}[letter] for letter in axes})


def counted(layout: KVLayout) -> Any:
    """A cache in which every element is different."""
    return torch.arange(math.prod(layout.shape), dtype=torch.int32).reshape(layout.shape)


def where(layout: KVLayout, **at: int) -> tuple[int, ...]:
    """The index of one element, said by axis letters. The slow reference: nothing is permuted."""
    return tuple(
        at["K"] * layout.head_size + at["D"] if name == "KD" else at[name] for name in dimensions(layout.axes)
    )


def reference(
    cache: Any, layout: KVLayout, block_ids: list[int], start: int, end: int, k: int
) -> list[list[list[int]]]:
    """Keys (k = 0) or values (1) of the tokens as nested lists, element by element."""

    def element(token: int, head: int, d: int) -> int:
        block, offset = divmod(token, layout.block_size)
        at = where(layout, K=k, B=block_ids[block], T=offset, H=head, D=d)
        return functools.reduce(operator.getitem, at, elements)  # type: ignore[return-value, arg-type]

    elements = cache.tolist()
    heads, sizes = range(layout.num_kv_heads), range(layout.head_size)
    return [[[element(token, head, d) for d in sizes] for head in heads] for token in range(start, end)]


RANGES = [(0, 12), (0, 5), (2, 10), (4, 5), (3, 9), (1, 12), (5, 5)]
TABLE = [4, 0, 5, 2]


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize("orders", [KEYS_AND_VALUES, LATENT], ids=len)
@pytest.mark.parametrize("check", ["gather", "scatter"])
def test_copies_agree_with_the_reference_in_every_axis_order_and_touch_nothing_else(
    check: str, orders: list[str], step: int
) -> None:
    # A test of each of the 126 orders would take longer to collect than to run.
    for axes in orders[:: step if len(orders) > 24 else 1]:
        {"gather": check_gather, "scatter": check_scatter}[check](axes)


def check_gather(axes: str) -> None:
    layout = layout_of(axes)
    cache = counted(layout)
    for start, end in RANGES:
        key, value = layout.gather(cache, TABLE, start, end)
        assert key.tolist() == reference(cache, layout, TABLE, start, end, 0)
        if layout.has_values:
            assert value is not None
            assert value.tolist() == reference(cache, layout, TABLE, start, end, 1)
        else:
            assert value is None and key.shape[1] == 1


def check_scatter(axes: str) -> None:
    layout = layout_of(axes)
    for start, end in RANGES:
        cache = counted(layout)
        shape = (end - start, layout.num_kv_heads, layout.head_size)
        key = -1 - torch.arange(shape[0] * shape[1] * shape[2], dtype=cache.dtype).reshape(shape)
        value = key - 10_000 if layout.has_values else None
        expected = cache.clone()
        for number, token in enumerate(range(start, end)):
            for head, d in itertools.product(range(shape[1]), range(shape[2])):
                for k, tokens in enumerate((key, value) if value is not None else (key,)):
                    at = where(layout, K=k, B=TABLE[token // 3], T=token % 3, H=head, D=d)
                    expected[at] = tokens[number, head, d]
        layout.scatter(cache, TABLE, start, key, value)
        assert torch.equal(cache, expected)


@settings(max_examples=3 * settings.default.max_examples // 2, deadline=None)
@given(data=st.data())
def test_what_is_scattered_is_gathered_again_from_any_layout(data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from(ALL))
    sizes = {letter: data.draw(st.integers(1, 5), label=letter) for letter in "THD"}
    num_blocks = data.draw(st.integers(1, 9))
    layout = layout_of(axes, B=num_blocks, **sizes)
    table = data.draw(st.permutations(range(num_blocks)))[: data.draw(st.integers(0, num_blocks))]
    start = data.draw(st.integers(0, len(table) * sizes["T"]))
    end = data.draw(st.integers(start, len(table) * sizes["T"]))
    shape = (end - start, layout.num_kv_heads, layout.head_size)
    key = torch.randn(shape)
    value = torch.randn(shape) if layout.has_values else None
    cache = torch.zeros(layout.shape)
    layout.scatter(cache, table, start, key, value)
    got_key, got_value = layout.gather(cache, table, start, end)
    assert torch.equal(got_key, key)
    assert got_value is value is None or torch.equal(got_value, value)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "uint16",
     "bool", "complex64", "complex128"],
)  # fmt: skip
@pytest.mark.parametrize("axes", ["KBTHD", "KBHTD", "BHTKD"])
def test_the_bits_of_every_dtype_pass_unchanged(dtype: str, axes: str) -> None:
    layout = layout_of(axes)
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    num_bytes = torch.empty(layout.shape).numel() * size
    high = 2 if dtype == "bool" else 256
    source = torch.randint(0, high, (num_bytes,), dtype=torch.uint8).view(kind).reshape(layout.shape)
    target = torch.zeros(num_bytes, dtype=torch.uint8).view(kind).reshape(layout.shape)
    layout.scatter(target, TABLE, 1, *layout.gather(source, TABLE, 1, 11))
    pairs = zip(layout.gather(source, TABLE, 1, 11), layout.gather(target, TABLE, 1, 11), strict=True)
    for mine, theirs in pairs:
        assert mine.dtype == kind
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


# -- views of larger tensors -------------------------------------------------------------------


def test_one_layer_of_a_tensor_of_all_layers_is_a_cache() -> None:
    layout = layout_of("BKTHD")
    every = torch.arange(2 * 6 * 2 * 3 * 2 * 4, dtype=torch.int32).reshape(6, 2, 2, 3, 2, 4)
    for layer in (0, 1):
        view = every[:, layer]
        layout.check(view)
        assert not view.is_contiguous()
        expected = layout.gather(view.contiguous(), TABLE, 1, 8)
        got = layout.gather(view, TABLE, 1, 8)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
        layout.scatter(view, TABLE, 1, expected[0] * 0 - 1, expected[1] * 0 - 2)
    assert (every == -1).sum() == (every == -2).sum() == 2 * 7 * 2 * 4


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "start", "end", "said"),
    [
        ([0, 6], 0, 6, "block 6 is out of range"),
        ([0, -1], 0, 6, "block -1 is out of range"),
        ([3, 1, 3], 0, 9, "block 3 comes twice"),
        ([0, 1], 0, 7, "do not fit 2 blocks of 3"),
        ([0, 1], -1, 2, "not a range"),
        ([0, 1], 3, 2, "not a range"),
        ([0.5, 1], 0, 6, "integers"),
        ([2**63, 1], 0, 6, "64-bit integers"),
    ],
)
@pytest.mark.parametrize("axes", ["KBTHD", "BHTKD"])
def test_blocks_that_cannot_be_meant_are_refused_and_nothing_is_copied(
    axes: str, table: list[int], start: int, end: int, said: str
) -> None:
    layout = layout_of(axes)
    cache = torch.zeros(layout.shape)
    key, value = torch.ones(12, 2, 4), torch.ones(12, 2, 4)
    with pytest.raises(LayoutError, match=said):
        layout.gather(cache, table, start, end)
    if end >= start:
        with pytest.raises(LayoutError, match=said):
            layout.scatter(cache, table, start, key[: end - start], value[: end - start])
    assert not cache.any()


# -- whole blocks, and devices ------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["BHTKD", "KBTHD"])
def test_blocks_in_a_kernels_own_order_are_moved_whole(axes: str) -> None:
    sizes = {"B": 6, "T": 4, "H": 2, "D": 3}
    layout = KVLayout(axes, sizes, block_format="a kernel")
    source, target = torch.rand(layout.shape), torch.zeros(layout.shape)
    key, value = layout.gather(source, (5, 0, 3), 4, 12)
    layout.scatter(target, (2, 1, 4), 4, key, value)
    at = axes.replace("KD", "D").index("B")
    for ours, theirs in ((0, 1), (3, 4)):
        assert torch.equal(source.select(at, ours), target.select(at, theirs))
    for start, end in ((0, 3), (1, 4), (4, 9)):
        with pytest.raises(LayoutError, match=f"tokens {start} to {end} are not whole blocks of 4"):
            layout.gather(source, (5, 0, 3), start, end)
    with pytest.raises(
        LayoutError, match=r"tokens 4 to 7 are not whole blocks of 4, .* own order \(a kernel\)"
    ):
        layout.scatter(target, (2, 1, 4), 4, key[:3], None if value is None else value[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("axes", ["KBTHD", "KBHTD", "BHTKD"])
def test_on_a_gpu_blocks_are_moved_as_on_a_cpu_and_the_host_does_not_wait(axes: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    layout = layout_of(axes, B=40, T=16, H=3, D=8)
    cache, table = counted(layout), [5, 1, 37, 0, 3, 6]
    expected = layout.gather(cache, table, 7, 90)
    on_gpu, target = cache.cuda(), torch.zeros_like(cache, device="cuda")
    layout.scatter(target, table, 7, *layout.gather(on_gpu, table, 7, 90))  # loads the kernels
    busy = torch.ones(8192, 8192, device="cuda")
    for _ in range(100):  # seconds of work
        busy = busy @ busy
    got = layout.gather(on_gpu, table, 7, 90)
    layout.scatter(target, table, 7, *got)
    assert not torch.cuda.current_stream().query()
    assert all(map(torch.equal, expected, (each.cpu() for each in got)))
    assert all(map(torch.equal, expected, layout.gather(target.cpu(), table, 7, 90)))
