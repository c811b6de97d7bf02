"""The content of entries (law LOOKUP-2): every part is returned bit by bit, as a copy."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import Put, Sink, entry, random_tensor, unlike
from kvplug_testing.contract.lookup.suite import LookupSuite, at_both_ends, inserted, matched, read, taken

DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "bool",
]
_PARTS = [("key",), ("value",), ("hidden",), ("key", "value"), ("key", "value", "hidden")]


class Contents(LookupSuite):
    """One entry at a time, with ``drop_select`` and ``select``."""

    @law("LOOKUP-2")
    @at_both_ends
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_an_entry_of_each_dtype_comes_out_with_its_bits(self, end: str, dtype: str) -> None:
        import torch

        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            pytest.skip(f"torch has no {dtype} here")
        store, buffer = self.opened(end)
        put = entry([1, 2, 3], roi=[True, False, True], dtype=dtype, layers=3)
        inserted(store, put)
        assert not unlike(put, read(buffer, [1, 3]))
        assert not unlike(put, taken(buffer, [1, 3]))

    @law("LOOKUP-2")
    @at_both_ends
    @pytest.mark.parametrize("missing", _PARTS, ids="-".join)
    def test_parts_may_be_none(self, end: str, missing: tuple[str, ...]) -> None:
        store, buffer = self.opened(end)
        put = entry([5, 6], without=missing)
        inserted(store, put)
        assert not unlike(put, read(buffer, [5, 6]))
        assert not unlike(put, taken(buffer, [5, 6]))

    @law("LOOKUP-2")
    @at_both_ends
    def test_tensors_that_are_not_contiguous_or_empty_come_out_as_they_read(self, end: str) -> None:
        store, buffer = self.opened(end)
        turned = random_tensor("float32", (4, 2, 3, 2), seed=1).permute(3, 2, 1, 0)
        for put in (
            Put(tokens=[1, 2, 3], key=turned, value=turned[:, :, :, ::2], hidden=turned[0, 0]),
            Put(tokens=[1, 2, 3], key=turned[:0], value=turned[:0], hidden=turned[0, 0, 0, 0]),
        ):
            inserted(store, put)
            assert not unlike(put, read(buffer, [1, 2]))
            assert not unlike(put, taken(buffer, [1, 2]))

    @law("LOOKUP-2")
    @at_both_ends
    def test_what_the_caller_does_with_its_own_after_the_insert_changes_nothing(self, end: str) -> None:
        import torch

        store, buffer = self.opened(end)
        put = entry([1, 2, 3], roi=[True, True, False])
        tokens, roi, metadata = torch.tensor([1, 2, 3]), torch.tensor([True, True, False]), {"of": [b"it"]}
        key, value, hidden = (part.clone() for part in (put.key, put.value, put.hidden))
        store.insert(tokens, roi, key, value, hidden, metadata=metadata)
        for part in (tokens, roi, key, value, hidden):
            part.zero_()
        metadata["of"].append(b"and more")
        kept = Put(
            tokens=put.tokens,
            roi=put.roi,
            key=put.key,
            value=put.value,
            hidden=put.hidden,
            metadata={"of": [b"it"]},
        )
        assert matched(buffer, [1, 2, 3]) == 2
        wrong = unlike(kept, read(buffer, [1, 2]))
        assert not wrong, f"what was overwritten after the insert came out: {wrong}"
        assert not unlike(kept, taken(buffer, [1, 2]))

    @law("LOOKUP-7")
    @at_both_ends
    def test_what_a_reader_does_with_its_copy_changes_nothing(self, end: str) -> None:
        store, buffer = self.opened(end)
        put = entry([1, 2, 3])
        inserted(store, put)
        got = read(buffer, [1, 2, 3])
        parts: list[Any] = [got.tokens, got.roi, got.key, got.value, got.hidden, got.header.tokens]
        for part in parts:
            part.zero_()
        got.header.metadata["of"] = "another one"
        wrong = unlike(put, read(buffer, [1, 2, 3]))
        assert not wrong, f"what a reader overwrote came out: {wrong}"
        assert not unlike(put, taken(buffer, [1, 2, 3]))

    @law("LOOKUP-7")
    @at_both_ends
    @pytest.mark.parametrize(
        "missing", [(), ("value",), ("hidden",)], ids=lambda names: "-".join(names) or "none"
    )
    def test_a_sink_gets_each_layer_and_the_entry_comes_without_them(
        self, end: str, missing: tuple[str, ...]
    ) -> None:
        store, buffer = self.opened(end)
        put = entry([1, 2, 3], layers=4, without=missing)
        entry_id = inserted(store, put)
        sink = Sink()
        got = read(buffer, [1, 2, 3, 4], sink=sink)
        assert not unlike(put, got, without=("key", "value"))
        assert [header.entry_id for header in sink.headers] == [entry_id], "begin is called once, first"
        assert sink.headers[0].num_layers == 4
        assert not sink.unlike(put)
