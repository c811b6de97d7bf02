"""How torch's dtypes travel: bit for bit where they are only moved, refused where they cannot be reduced."""

from __future__ import annotations

import pytest
import torch

import pynccl_ranks as ranks
from kvplug import UnsupportedError
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result, Version
from kvplug_pynccl.nccl.dtypes import Carried, moved_as, reduced_as
from kvplug_pynccl.nccl.library import Library

NEW = Version(2, 32, 3)
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_is_moved_in_its_own_size(dtype: torch.dtype) -> None:
    carried = moved_as(dtype)
    assert carried.dtype.nbytes * carried.per_element == dtype.itemsize


def test_bool_and_8_bit_floats_are_moved_as_bytes() -> None:
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
        assert moved_as(dtype) == Carried(DataType.UINT8)
    assert moved_as(torch.bfloat16) == Carried(DataType.BFLOAT16)
    assert moved_as(torch.complex64) == Carried(DataType.UINT8, 8)
    assert moved_as(torch.int16) == Carried(DataType.UINT8, 2)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.complex128], ids=str
)
def test_every_bit_arrives(dtype: torch.dtype, fake_path: str, nccl: Library) -> None:
    sent = torch.arange(256 * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    got = torch.zeros_like(sent)
    carried = moved_as(dtype)
    unique_id = bytes(nccl.get_unique_id())
    one, other = (ranks.Rank(fake_path, unique_id, 2, rank) for rank in range(2))
    assert (one.settled(), other.settled()) == (Result.SUCCESS, Result.SUCCESS)
    one.enqueue("send", sent.data_ptr(), 256 * carried.per_element, carried.dtype, 1)
    other.enqueue("recv", got.data_ptr(), 256 * carried.per_element, carried.dtype, 0)
    assert one.stream.synchronize(60.0) and other.stream.synchronize(60.0)
    assert torch.equal(sent, got)
    for each in (one, other):
        nccl.comm_abort(each.comm)
        each.stream.close()


@pytest.mark.parametrize("op", RedOp, ids=lambda op: op.name)
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64],
    ids=str,
)
def test_numbers_are_reduced_as_what_they_are(dtype: torch.dtype, op: RedOp) -> None:
    assert reduced_as(dtype, op, Version(2, 20, 0)).name.lower() == str(dtype).removeprefix("torch.")


def test_8_bit_floats_are_reduced_by_newer_releases() -> None:
    assert reduced_as(torch.float8_e4m3fn, RedOp.SUM, NEW) == DataType.FLOAT8E4M3
    assert reduced_as(torch.float8_e5m2, RedOp.SUM, Version(2, 24, 0)) == DataType.FLOAT8E5M2
    with pytest.raises(UnsupportedError, match=r"torch\.float8_e5m2 from 2\.24\.0 on, and this is 2\.23\.4"):
        reduced_as(torch.float8_e5m2, RedOp.SUM, Version(2, 23, 4))


def test_bool_is_reduced_where_that_means_something() -> None:
    assert reduced_as(torch.bool, RedOp.MAX, NEW) == reduced_as(torch.bool, RedOp.MIN, NEW) == DataType.UINT8
    for op in (RedOp.SUM, RedOp.PROD, RedOp.AVG):
        with pytest.raises(UnsupportedError, match=rf"torch\.bool has no {op.name}; use MAX"):
            reduced_as(torch.bool, op, NEW)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.float8_e4m3fnuz], ids=str)
def test_what_nccl_does_not_reduce_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=rf"does not reduce {dtype}; it does int8, .*, bool"):
        reduced_as(dtype, RedOp.SUM, NEW)
