"""Memory of a pool, for its tests: asked for, written to, compared, and looked at from a forked child."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from kvplug.net.wire.tensors import TensorMeta, memory_of, memory_of_writable
from kvplug_shm.memory.pool import Pool


def of(nbytes: int) -> TensorMeta:
    return TensorMeta("uint8", (nbytes,))


def fill(tensor: torch.Tensor, value: int) -> None:
    memory = memory_of_writable(tensor)
    memory[:] = bytes([value]) * memory.nbytes


def holds(tensor: torch.Tensor, value: int) -> bool:
    memory = memory_of(tensor)
    return bytes(memory[:100]) == bytes([value]) * 100 and memory[-1] == value


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as f:
        spans = (line.split(" ", 1)[0].split("-") for line in f)
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def idle(pool: Pool, *sizes: int) -> list[int]:
    """Have blocks of these sizes come back, in this order; their addresses."""
    tensors = [pool.tensor(of(size)) for size in sizes]
    addresses = [tensor.data_ptr() for tensor in tensors]
    while tensors:
        del tensors[0]
    return addresses


def in_forked_child(call: Callable[[], object]) -> str:
    """What ``call`` returns or raises in a forked child."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(call())
        except BaseException as e:
            said = repr(e)
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    limit = time.monotonic() + 30
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(readable)
            return "it hung"
        time.sleep(0.01)
    with os.fdopen(readable) as f:
        return f.read()
