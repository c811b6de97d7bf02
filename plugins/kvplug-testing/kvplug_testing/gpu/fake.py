"""A ``libnccl`` and a ``libcudart`` for tests, without a GPU: compiled from C as they are needed.

    path = fake.NCCL.build(folder)
    nccl = load(path)
    controls = fake.Controls(path)
    stream = controls.stream()
    ...                         # nccl.all_reduce(..., comm, stream.handle)
    assert stream.wait(stream.record(), timeout=10.0)

Streams are threads. Faults are set by name, with :meth:`Controls.set` or, for a child process, in its
environment (:meth:`FakeLibrary.environment`). Both libraries have ``gate``: while it is 1, a stream does not
go on from where it was given a gate.

:data:`NCCL` works over Unix sockets and host memory. It has the functions that are bound, and behaves as NCCL
does where tests look: operations are enqueued on a stream and go on in a thread; those of one communicator go
one after the other, whatever stream they are on; a non-blocking communicator is in progress until it has been
asked; one that failed ends by an abort only. The ranks are processes of one host (or communicators of one
process) that share a unique id.

=================== =========== ==============================================================================
name                default
=================== =========== ==============================================================================
``version``         23203       what ``ncclGetVersion`` gives
``polls``           1           how many times a call on a non-blocking communicator is still in progress
``hold``            0           1: operations do not begin
``call_result``     0           what enqueuing an operation gives at once, if it is not 0
``call_hangs``      0           1: enqueuing an operation does not return
``init_hangs``      0           1: this rank does not show itself to the others
``init_result``     0           what the start ends in, if it is not 0
``begin_result``    0           what the start gives at once, if it is not 0; it is there, and has failed
``fail_after``      -1          the communicator fails when so many operations are done
``fail_result``     6           what it fails with
``hang_after``      -1          when so many operations are done, the next one never ends
``exit_after``      -1          when so many operations are done, the process kills itself inside the next one
``peer_result``     6           what it fails with when it finds a rank gone; 0: the operation never ends
``finalize_hangs``  0           1: a communicator is never finalized
``abort_hangs``     0           1: an abort does not return
``operations``      0           counts those that were done
``communicators``   0           counts those that are there
``aborts``          0           counts those that were aborted
=================== =========== ==============================================================================

Ranks that give the same ``KVPLUG_TEST_NCCL_GPU`` and ``NCCL_HOSTID`` have one GPU, which is invalid usage.
Ranks that disagree on the world size, or on what an operation moves, wait for ever, as NCCL's do. An id knows
no process: the one that made it may be gone.

:data:`CUDART` has shared memory for device memory. Another process maps it by its handle; its own process
cannot. ``cudaFree`` waits for all streams, as CUDA's does, and what was freed is overwritten.

====================== ========== =========================================================================
name                   default
====================== ========== =========================================================================
``version``            12090      what ``cudaRuntimeGetVersion`` gives
``devices``            1          how many GPUs there are
``gpu``                1          which GPU device 0 is; two processes with the same number have the same
``hold``               0          1: copies do not begin
``capturing``          0          1: a thread captures a graph, and others must not disturb it
``delay_us``           0          each copy takes so much longer
``malloc_result``      0          what ``cudaMalloc`` gives, if it is not 0
``open_result``        0          what ``cudaIpcOpenMemHandle`` gives, if it is not 0
``copy_result``        0          what ``cudaMemcpyAsync`` gives at once, if it is not 0
``fail_after``         -1         when so many copies are done, the device fails, for good
``fail_result``        700        what it fails with
``failed``             0          what it has failed with; 0 makes it work again, as in a new process
``exit_after``         -1         when so many copies are done, the process kills itself inside the next one
``copies``             0          counts those that were done
``allocations``        0          counts those that are there
``mappings``           0          counts other processes' allocations that are open here
``freed_while_mapped`` 0          counts what was freed while a process that lives had it open
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
    """Where its own files are, beside those that all have."""
    file: str
    """What the library is called."""
    variable: str
    """Names the faults of a process from the beginning."""
    defines: tuple[str, ...] = ()

    def build(self, folder: Path, *flags: str) -> str:
        """Compile it into ``folder``, with ``CC`` or else ``cc``, and return its path.

        Raises:
            OSError: there is no compiler.
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
        """What a process needs in its environment for faults from the beginning. A wrong name ends it."""
        return {self.variable: ",".join(f"{name}={int(value)}" for name, value in values.items())}


NCCL: Final = FakeLibrary("nccl", "libnccl.so.2", "KVPLUG_TEST_NCCL")
OLD_NCCL: Final = attrs.evolve(NCCL, file="libnccl-old.so.2", defines=("OLD_NCCL",))
"""Without what only newer releases of NCCL have."""
CUDART: Final = FakeLibrary("cudart", "libcudart.so.12", "KVPLUG_TEST_CUDART")


class Controls:
    """The levers of the fake at ``path``, in this process."""

    def __init__(self, path: str) -> None:
        """Raises AttributeError: it is no fake."""
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
        """From now on, for all of this process. Raises LookupError: there is no such fault."""
        for name, value in values.items():
            if self._set(name.encode(), int(value)):
                raise LookupError(f"the fake has no {name}")

    def get(self, name: str) -> int:
        """Raises LookupError: there is no such fault or counter."""
        value = ctypes.c_long()
        if self._get(name.encode(), ctypes.byref(value)):
            raise LookupError(f"the fake has no {name}")
        return value.value

    def reset(self) -> None:
        """All faults are as they were when the library was loaded. What is counted goes on being counted."""
        self._reset()

    def stream(self) -> Stream:
        """A new one. It has a thread, until it is closed and has done what it was given."""
        return Stream(self, int(self._new()))

    def default_stream(self) -> Stream:
        """That of handle 0, which is there for good."""
        return Stream(self, 0)


@attrs.frozen
class Stream:
    """Work that is done in order, beside its caller. ``handle`` is what the library is given.

    Raises (every method but ``close``):
        ClosedError: it was closed.
    """

    _controls: Controls
    handle: int

    def record(self) -> int:
        """An event: all that was enqueued so far."""
        return self._check(self._controls._record(self.handle))

    def wait(self, event: int, timeout: float | None = None) -> bool:
        """Whether all of it is done, at the latest after ``timeout`` seconds."""
        milliseconds = -1 if timeout is None else int(timeout * 1000)
        return bool(self._check(self._controls._wait(self.handle, event, milliseconds)))

    def is_done(self, event: int) -> bool:
        return self.wait(event, 0.0)

    def synchronize(self, timeout: float | None = None) -> bool:
        """Whether it has done all it was given, at the latest after ``timeout`` seconds."""
        return self.wait(self.record(), timeout)

    def wait_for(self, other: Stream, event: int) -> None:
        """What is enqueued here from now on begins when that event of the other is done."""
        self._check(self._controls._follow(self.handle, other.handle, event))

    def put_gate(self) -> None:
        """What is enqueued here from now on begins when ``gate`` is 0."""
        self._check(self._controls._gate(self.handle))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between two addresses, whose memory is kept alive by the caller."""
        self._check(self._controls._copy(self.handle, to, source, nbytes))

    def close(self) -> None:
        """It still does what it was given; nothing waits for that. Idempotent."""
        self._controls._free(self.handle)

    def _check(self, answer: int) -> int:
        if answer < 0:
            raise ClosedError("this stream of the fake library is closed")
        return int(answer)


def _function(library: ctypes.CDLL, name: str, returns: Any, *takes: Any) -> Any:
    function = library[f"kvplug_fake_{name}"]
    function.restype, function.argtypes = returns, takes
    return function
