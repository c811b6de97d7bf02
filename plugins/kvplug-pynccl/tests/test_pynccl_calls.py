"""NCCL's functions are called: without the interpreter's lock, in the right types, and with its errors."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import kvplug
import pynccl_ranks as ranks
from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError, UnsupportedError
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl import errors
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result, Version
from kvplug_pynccl.nccl.dtypes import Carried, moved_as, reduced_as
from kvplug_pynccl.nccl.errors import NcclError, NcclTimeoutError, error_of
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


def test_a_communicator_is_asked_and_destroyed(nccl: Library, controls: fake.Controls) -> None:
    assert repr(nccl) == f"<NCCL 2.32.3 of {nccl.path}>"
    assert nccl.get_error_string(Result.TIMEOUT) == "timeout"
    comm = nccl.comm_init_rank(1, nccl.get_unique_id(), 0)
    assert (nccl.comm_count(comm), nccl.comm_user_rank(comm), nccl.comm_cu_device(comm)) == (1, 0, 0)
    assert nccl.comm_destroy(comm) is Result.SUCCESS  # also one that was not finalized
    controls.set(init_result=77)  # of a release to come
    me = ranks.Rank(nccl, nccl.get_unique_id())
    assert me.settled() == 77
    with pytest.raises(NcclError, match="the start gave result 77"):
        nccl.raise_for(nccl.comm_get_async_error(me.comm), "the start", me.comm)
    me.end()


def test_newer_functions_are_there(nccl: Library) -> None:
    (me,) = ranks.near(nccl)
    data = ranks.ints(0)
    window, result = nccl.comm_window_register(me.comm, ranks.at(data), 4)
    assert (window.value, result) == (ranks.at(data), Result.SUCCESS)
    nccl.comm_window_deregister(me.comm, window.value)
    properties = nccl.comm_query_properties(me.comm)
    assert (properties.rank, properties.nRanks) == (0, 1)
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


@pytest.mark.parametrize("op", RedOp, ids=lambda op: op.name)
def test_numbers_are_reduced_as_what_they_are(op: RedOp) -> None:
    for name in ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float64"):
        assert reduced_as(getattr(torch, name), op, Version(2, 20, 0)).name.lower() == name


@pytest.mark.parametrize(
    ("dtype", "op", "version", "carried"),
    [
        (torch.float8_e4m3fn, RedOp.SUM, NEW, DataType.FLOAT8E4M3),
        (torch.float8_e5m2, RedOp.SUM, Version(2, 24, 0), DataType.FLOAT8E5M2),
        (torch.float8_e5m2, RedOp.SUM, OLD, r"torch\.float8_e5m2 from 2\.24\.0 on, and this is 2\.23\.4"),
        (torch.bool, RedOp.MAX, NEW, DataType.UINT8),
        (torch.bool, RedOp.MIN, NEW, DataType.UINT8),
        *((torch.bool, op, NEW, f"torch.bool has no {op.name}; use MAX") for op in (RedOp.SUM, RedOp.AVG)),
        *(
            (dtype, RedOp.SUM, NEW, f"does not reduce {dtype}; it does int8, .*, bool")
            for dtype in (torch.complex64, torch.int16, torch.float8_e4m3fnuz)
        ),
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
CLASSES = {name: each for name, each in vars(errors).items() if isinstance(each, type)}


@pytest.mark.parametrize("result", FAILURES, ids=lambda result: result.name)
def test_a_failure_is_an_error_of_its_own(result: Result) -> None:
    error = error_of(result, "ncclSend", "what\n  happened.\n")
    assert isinstance(error, NcclError) and isinstance(error, TransportError) and isinstance(error, OSError)
    assert (error.result, error.function) == (result, "ncclSend")
    assert re.match(r"ncclSend gave nccl[A-Z]\w+: ", str(error))
    assert "NCCL says: what happened. NCCL_DEBUG=WARN shows more" in str(error)


def test_each_failure_has_another_class_which_is_also_what_it_means() -> None:
    kinds = [type(error_of(result, "f")) for result in FAILURES]
    assert len({*kinds}) == len(kinds)
    assert {*kinds, NcclError} == {each for each in CLASSES.values() if issubclass(each, NcclError)}
    for name, meaning in (
        ("RemoteError", PeerGoneError),
        ("TimeoutError", TimeoutError),
        ("InvalidUsageError", ValueError),
        ("InvalidArgumentError", ValueError),
        ("LibraryError", TransportError),
    ):
        assert issubclass(CLASSES[f"Nccl{name}"], meaning)
    text = str(error_of(Result.INVALID_USAGE, "ncclCommInitRank"))
    assert "two ranks have the same GPU" in text and "do not agree on the world size, the unique id" in text
    assert "NCCL says" not in text


def test_a_result_that_nobody_knows_is_an_error_with_its_number_and_what_is_in_progress_is_none(
    nccl: Library,
) -> None:
    error = error_of(42, "ncclSend")
    assert type(error) is NcclError and "result 42" in str(error) and error.result == 42
    assert nccl.raise_for(Result.IN_PROGRESS, "x") is Result.IN_PROGRESS
    assert nccl.raise_for(0, "x") is Result.SUCCESS
    with pytest.raises(NcclTimeoutError, match="the start gave ncclTimeout"):
        nccl.raise_for(Result.TIMEOUT, "the start")


def test_every_error_of_the_plugin_is_in_its_readme() -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    named = {name for name, each in CLASSES.items() if issubclass(each, KvplugError)} - {*vars(kvplug.errors)}
    assert {"NcclError", "NcclLibraryError"} <= named
    assert not {name for name in named if f"`{name}`" not in readme}
