"""Fakes of ``libnccl`` and ``libcudart`` for tests without a GPU; compiled from C when needed.

    path = fake.NCCL.build(folder)
    nccl = load(path)
    controls = fake.Controls(path)
    stream = controls.stream()
    ...                         # nccl.all_reduce(..., comm, stream.handle)
    assert stream.wait(stream.record(), timeout=10.0)

Streams are threads. Faults are set by name, with :meth:`Controls.set` or, for a child process, in its
environment (:meth:`FakeLibrary.environment`). Both libraries have ``gate``: while it is 1, a stream stops at
each gate that was enqueued on it.

:data:`NCCL` works over Unix sockets and host memory. It has the functions that the plugin binds, and behaves
as NCCL does in these respects: operations are enqueued on a stream and run in a thread; operations of one
communicator run one after the other, whatever their streams; a call on a non-blocking communicator is in
progress until it has been polled; a failed communicator must be aborted. A group has operations of one
communicator on one stream; what is reduced is summed. The ranks are processes of one host (or communicators
of one process) that share a unique id.

=================== =========== ==============================================================================
name                default
=================== =========== ==============================================================================
``version``         23203       result of ``ncclGetVersion``
``hold``            0           1: operations do not start
``call_result``     0           if not 0, enqueuing an operation returns it at once
``call_hangs``      0           1: enqueuing an operation does not return
``init_hangs``      0           1: this rank does not contact the others
``init_result``     0           if not 0, the initialization ends with it
``begin_result``    0           if not 0, the initialization returns it at once, with a failed communicator
``fail_after``      -1          the communicator fails after this many operations
``fail_result``     6           its error then
``hang_after``      -1          after this many operations, the next one never ends
``exit_after``      -1          after this many operations, the process kills itself inside the next one
``peer_result``     6           its error when another rank is gone; 0: the operation never ends
``abort_hangs``     0           1: an abort does not return
``operations``      0           number of finished operations
``communicators``   0           number of existing communicators
=================== =========== ==============================================================================

Ranks with the same ``KVPLUG_TEST_NCCL_GPU`` and ``NCCL_HOSTID`` share one GPU, which is invalid usage. Ranks
that disagree on the world size, or on the data of an operation, wait for ever, as with NCCL. An id works also
after the process that made it is gone.

:data:`CUDART` uses shared memory as device memory. Another process maps it by its handle; its own process
cannot. ``cudaFree`` waits for all streams, as CUDA does, and overwrites the freed memory.

====================== ========== =========================================================================
name                   default
====================== ========== =========================================================================
``version``            12090      result of ``cudaRuntimeGetVersion``
``devices``            1          number of GPUs
``gpu``                1          id of the GPU that is device 0; processes with the same id share the GPU
``hold``               0          1: copies do not start
``capturing``          0          1: a thread captures a graph; other threads must not disturb it
``delay_us``           0          extra time of each copy, in microseconds
``malloc_result``      0          if not 0, ``cudaMalloc`` returns it
``open_result``        0          if not 0, ``cudaIpcOpenMemHandle`` returns it
``fail_after``         -1         after this many copies, the device fails permanently
``fail_result``        700        its error then
``failed``             0          its current error; 0 repairs the device, as in a new process
``exit_after``         -1         after this many copies, the process kills itself inside the next one
``copies``             0          number of finished copies
``allocations``        0          number of existing allocations
``mappings``           0          number of other processes' allocations that are open here
``freed_while_mapped`` 0          number of allocations freed while a live process had them open
====================== ========== =========================================================================
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any, Final

import attrs

from kvplug import ClosedError

GPU_VARIABLE: Final = "KVPLUG_TEST_NCCL_GPU"
_SOURCES: Final = Path(__file__).with_name("native")
_FLAGS: Final = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", f"-I{_SOURCES}")


@attrs.frozen
class FakeLibrary:
    """The source of a library."""

    folder: str
    """The folder of its sources, besides the common ones."""
    file: str
    """The file name of the library."""
    variable: str
    """The environment variable with a process's initial faults."""
    defines: tuple[str, ...] = ()

    def build(self, folder: Path, *flags: str) -> str:
        """Compile it into ``folder``, with ``CC`` or else ``cc``, and return its path.

        Raises:
            OSError: no compiler is found.
            subprocess.CalledProcessError: it does not compile.
        """
        path = str(folder / self.file)
        compiler = shlex.split(os.environ.get("CC") or "cc")
        sources = [*_SOURCES.glob("*.c"), *(_SOURCES / self.folder).glob("*.c")]
        defines = [f"-D{name}" for name in self.defines]
        command = [*compiler, *_FLAGS, *defines, *flags, "-o", path, *map(str, sorted(sources)), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        return path

    def environment(self, **values: int) -> dict[str, str]:
        """Environment variables for a process with these initial faults. An unknown name ends the process."""
        return {self.variable: ",".join(f"{name}={int(value)}" for name, value in values.items())}


NCCL: Final = FakeLibrary("nccl", "libnccl.so.2", "KVPLUG_TEST_NCCL")
OLD_NCCL: Final = attrs.evolve(NCCL, file="libnccl-old.so.2", defines=("OLD_NCCL",))
"""Without functions that only newer releases of NCCL have."""
CUDART: Final = FakeLibrary("cudart", "libcudart.so.12", "KVPLUG_TEST_CUDART")


class Controls:
    """Controls the fake library at ``path``, in this process."""

    def __init__(self, path: str) -> None:
        """Raises AttributeError: it is not a fake library."""
        library = ctypes.CDLL(path)
        handle, i64 = ctypes.c_void_p, ctypes.c_int64
        self._set = _function(library, "set", ctypes.c_int, ctypes.c_char_p, ctypes.c_long)
        self._get = _function(library, "get", ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_long))
        self._reset = _function(library, "reset", None)
        self._new = _function(library, "stream_new", handle)
        self._free = _function(library, "stream_free", None, handle)
        self._record = _function(library, "stream_record", i64, handle)
        self._wait = _function(library, "stream_wait", ctypes.c_int, handle, i64, i64)
        self._follow = _function(library, "stream_follow", ctypes.c_int, handle, handle, i64)
        self._copy = _function(library, "stream_copy", ctypes.c_int, handle, handle, handle, ctypes.c_size_t)
        self._gate = _function(library, "stream_gate", ctypes.c_int, handle)

    def set(self, **values: int) -> None:
        """Set faults for the whole process. Raises LookupError: there is no such fault."""
        for name, value in values.items():
            if self._set(name.encode(), int(value)):
                raise LookupError(f"the fake has no {name}")

    def get(self, name: str) -> int:
        """The value of a fault or counter. Raises LookupError: there is none with this name."""
        value = ctypes.c_long()
        if self._get(name.encode(), ctypes.byref(value)):
            raise LookupError(f"the fake has no {name}")
        return value.value

    def reset(self) -> None:
        """Reset all faults to their values when the library was loaded. Counters keep their values."""
        self._reset()

    def stream(self) -> Stream:
        """A new stream. Its thread runs until the stream is closed and its work is done.

        Raises:
            MemoryError: there is no memory for another thread.
        """
        handle = self._new()
        if handle is None:
            raise MemoryError("the fake library has no memory for another stream")
        return Stream(self, int(handle))

    def default_stream(self) -> Stream:
        """The stream with handle 0, which always exists."""
        return Stream(self, 0)


@attrs.frozen
class Stream:
    """Runs work in order, asynchronously. ``handle`` is the value for the library's functions.

    Raises (every method but ``close``):
        ClosedError: it is closed.
    """

    _controls: Controls
    handle: int

    def record(self) -> int:
        """An event for all work enqueued so far."""
        return self._check(self._controls._record(self.handle))

    def wait(self, event: int, timeout: float | None = None) -> bool:
        """Wait for an event, for at most ``timeout`` seconds; returns whether its work is done."""
        milliseconds = -1 if timeout is None else int(timeout * 1000)
        return bool(self._check(self._controls._wait(self.handle, event, milliseconds)))

    def is_done(self, event: int) -> bool:
        return self.wait(event, 0.0)

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait for all enqueued work, for at most ``timeout`` seconds; returns whether it is done."""
        return self.wait(self.record(), timeout)

    def wait_for(self, other: Stream, event: int) -> None:
        """Work enqueued here from now on starts after that event of the other stream."""
        self._check(self._controls._follow(self.handle, other.handle, event))

    def put_gate(self) -> None:
        """Work enqueued here from now on starts when ``gate`` is 0."""
        self._check(self._controls._gate(self.handle))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between two addresses; the caller keeps their memory alive."""
        self._check(self._controls._copy(self.handle, to, source, nbytes))

    def close(self) -> None:
        """Close it without waiting; work already enqueued is still done. Idempotent."""
        self._controls._free(self.handle)

    def _check(self, answer: int) -> int:
        if answer < 0:
            raise ClosedError("this stream of the fake library is closed")
        return int(answer)


def _function(library: ctypes.CDLL, name: str, returns: Any, *takes: Any) -> Any:
    function = library[f"kvplug_fake_{name}"]
    function.restype, function.argtypes = returns, takes
    return function
