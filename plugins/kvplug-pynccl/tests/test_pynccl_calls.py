"""NCCL's functions are called: without the interpreter's lock, in the right types, and with its errors."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from typing import Any

import pytest
import torch

import pynccl_ranks as ranks
from kvplug import PeerGoneError, TimeoutError, TransportError, UnsupportedError
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl import errors
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result, Version
from kvplug_pynccl.nccl.dtypes import Carried, moved_as, reduced_as
from kvplug_pynccl.nccl.errors import NcclError, error_of
from kvplug_pynccl.nccl.library import Library


def test_a_call_that_waits_lets_other_threads_run(nccl: Library, controls: fake.Controls) -> None:
    (me,) = ranks.near(nccl)
    controls.set(abort_hangs=1)
    thread = threading.Thread(target=nccl.comm_abort, args=(me.comm,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    controls.set(abort_hangs=0)
    thread.join(60.0)
    assert not thread.is_alive()
    me.stream.close()


def test_a_communicator_is_destroyed_and_a_start_that_failed_is_explained(
    nccl: Library, controls: fake.Controls
) -> None:
    comm = nccl.comm_init_rank(1, nccl.get_unique_id(), 0)
    assert nccl.comm_destroy(comm) is Result.SUCCESS  # also one that was not finalized
    controls.set(init_result=77)  # of a release to come
    me = ranks.Rank(nccl, nccl.get_unique_id())
    assert me.settled() == 77
    with pytest.raises(NcclError, match="the start gave result 77"):
        nccl.raise_for(nccl.comm_get_async_error(me.comm), "the start", me.comm)
    me.end()


def test_what_nccl_writes_at_the_end_of_a_start_is_kept_until_then(nccl: Library) -> None:
    """A non-blocking start writes the communicator twice: at once, and from its thread when it is over."""
    unique_id = nccl.get_unique_id()
    first = ranks.Rank(nccl, unique_id, 2, 0)
    gc.collect()
    others = [ctypes.c_void_p(0x5A5A5A5A) for _ in range(10_000)]  # in the place of whatever was let go
    second = ranks.Rank(nccl, unique_id, 2, 1)
    assert (first.settled(), second.settled()) == (Result.SUCCESS, Result.SUCCESS)
    for each in (first, second):
        each.end()
    assert {each.value for each in others} == {0x5A5A5A5A}


# -- dtypes ----------------------------------------------------------------------------------------

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
NEW, OLD = Version(2, 32, 3), Version(2, 23, 4)


def test_a_dtype_is_moved_in_its_own_size_as_bytes_where_nccl_has_no_type_for_it() -> None:
    for dtype in DTYPES:
        carried = moved_as(dtype)
        assert carried.dtype.nbytes * carried.per_element == dtype.itemsize
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
        assert moved_as(dtype) == Carried(DataType.UINT8)
    assert moved_as(torch.bfloat16) == Carried(DataType.BFLOAT16)
    assert moved_as(torch.complex64) == Carried(DataType.UINT8, 8)


@pytest.mark.parametrize(
    ("dtype", "op", "version", "carried"),
    [
        (torch.bfloat16, RedOp.SUM, OLD, DataType.BFLOAT16),
        (torch.float8_e4m3fn, RedOp.SUM, NEW, DataType.FLOAT8E4M3),
        (torch.float8_e5m2, RedOp.SUM, OLD, r"torch\.float8_e5m2 from 2\.24\.0 on, and this is 2\.23\.4"),
        (torch.bool, RedOp.MAX, NEW, DataType.UINT8),
        (torch.bool, RedOp.SUM, NEW, "torch.bool has no SUM; use MAX"),
        (torch.int16, RedOp.SUM, NEW, "does not reduce torch.int16; it does int8, .*, bool"),
    ],
    ids=str,
)
def test_other_dtypes_are_reduced_where_that_means_something_or_refused_by_name(
    dtype: torch.dtype, op: RedOp, version: Version, carried: Any
) -> None:
    if isinstance(carried, DataType):
        assert reduced_as(dtype, op, version) == carried
        return
    with pytest.raises(UnsupportedError, match=carried):
        reduced_as(dtype, op, version)


# -- errors ----------------------------------------------------------------------------------------

FAILURES = [result for result in Result if result not in (Result.SUCCESS, Result.IN_PROGRESS)]
CLASSES = [each for each in vars(errors).values() if isinstance(each, type)]


def test_each_failure_has_another_class_which_is_also_what_it_means() -> None:
    made = [error_of(result, "ncclSend", "what\n  happened.\n") for result in FAILURES]
    assert {*map(type, made)} | {NcclError} == {each for each in CLASSES if issubclass(each, NcclError)}
    for error in made:
        assert isinstance(error, TransportError) and isinstance(error, OSError)
        assert re.match(r"ncclSend gave nccl[A-Z]\w+: ", str(error))
        assert "NCCL says: what happened. NCCL_DEBUG=WARN shows more" in str(error)
    for result, meaning in ((Result.REMOTE_ERROR, PeerGoneError), (Result.TIMEOUT, TimeoutError)):
        assert isinstance(error_of(result, "f"), meaning)
