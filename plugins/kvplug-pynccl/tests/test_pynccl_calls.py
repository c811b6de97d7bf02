"""NCCL's functions are called: without the interpreter's lock, with their arguments in order."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import pynccl_ranks as ranks
from kvplug_lab.gpu import fake
from kvplug_pynccl.nccl.abi import DataType, RedOp, Result
from kvplug_pynccl.nccl.errors import (
    NcclError,
)
from kvplug_pynccl.nccl.library import Library
from kvplug_pynccl.nccl.prototypes import PROTOTYPES


def test_a_call_that_waits_lets_other_threads_run(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    me = ranks.Rank(fake_path, bytes(nccl.get_unique_id()), 1, 0)
    assert me.settled() == Result.SUCCESS
    controls.set(abort_hangs=1)
    thread = threading.Thread(target=nccl.comm_abort, args=(me.comm,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    controls.set(abort_hangs=0)
    thread.join(60.0)
    assert not thread.is_alive()
    me.stream.close()


def test_a_communicator_is_asked_and_destroyed(
    fake_path: str, nccl: Library, controls: fake.Controls
) -> None:
    assert (
        repr(nccl) == f"<NCCL 2.32.3 of {fake_path}>" and nccl.get_error_string(Result.TIMEOUT) == "timeout"
    )
    comm = nccl.comm_init_rank(1, nccl.get_unique_id(), 0)
    assert (nccl.comm_count(comm), nccl.comm_user_rank(comm), nccl.comm_cu_device(comm)) == (1, 0, 0)
    assert nccl.comm_destroy(comm) is Result.SUCCESS  # also one that was not finalized
    controls.set(init_result=77)  # of a release to come
    me = ranks.Rank(fake_path, bytes(nccl.get_unique_id()), 1, 0)
    assert me.settled() == 77
    with pytest.raises(NcclError, match="the start gave result 77"):
        nccl.raise_for(nccl.comm_get_async_error(me.comm), "the start", me.comm)
    nccl.comm_abort(me.comm)
    me.stream.close()


def test_what_nccl_writes_at_the_end_of_a_start_is_kept_until_then(fake_path: str, nccl: Library) -> None:
    """A non-blocking start writes the communicator twice: at once, and from its thread when it is over."""
    unique_id = bytes(nccl.get_unique_id())
    first = ranks.Rank(fake_path, unique_id, 2, 0)
    gc.collect()
    others = [ctypes.c_void_p(0x5A5A5A5A) for _ in range(10_000)]  # in the place of whatever was let go
    second = ranks.Rank(fake_path, unique_id, 2, 1)
    assert (first.settled(), second.settled()) == (Result.SUCCESS, Result.SUCCESS)
    for each in (first, second):
        nccl.comm_abort(each.comm)
        each.stream.close()
    assert {each.value for each in others} == {0x5A5A5A5A}


def test_importing_the_binding_loads_neither_torch_nor_nccl() -> None:
    code = (
        "import sys, kvplug_pynccl.nccl.library, kvplug_pynccl.nccl.dtypes, kvplug_lab.gpu.fake\n"
        "assert 'torch' not in sys.modules and 'libnccl' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_arguments_arrive_in_their_order(nccl: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the arguments of each operation, as the function gets them."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def recorder(name: str) -> Callable[..., int]:
        return lambda *args: seen.append((name, args)) or 0  # type: ignore[func-returns-value]

    monkeypatch.setattr(nccl, "_functions", {name: recorder(name) for name in PROTOTYPES})
    dtype, op = DataType.FLOAT16, RedOp.MAX
    nccl.all_reduce(1, 2, 3, dtype, op, 4, 5)
    nccl.reduce(1, 2, 3, dtype, op, 6, 4, 5)
    nccl.all_gather(1, 2, 3, dtype, 4, 5)
    nccl.reduce_scatter(1, 2, 3, dtype, op, 4, 5)
    nccl.broadcast(1, 2, 3, dtype, 6, 4, 5)
    nccl.send(1, 3, dtype, 6, 4, 5)
    nccl.recv(2, 3, dtype, 6, 4, 5)
    assert seen == [
        ("ncclAllReduce", (1, 2, 3, dtype, op, 4, 5)),
        ("ncclReduce", (1, 2, 3, dtype, op, 6, 4, 5)),
        ("ncclAllGather", (1, 2, 3, dtype, 4, 5)),
        ("ncclReduceScatter", (1, 2, 3, dtype, op, 4, 5)),
        ("ncclBroadcast", (1, 2, 3, dtype, 6, 4, 5)),
        ("ncclSend", (1, 3, dtype, 6, 4, 5)),
        ("ncclRecv", (2, 3, dtype, 6, 4, 5)),
    ]
