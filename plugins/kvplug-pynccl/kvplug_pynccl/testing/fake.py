"""A ``libnccl`` for tests, without a GPU: compiled from C as it is needed, over Unix sockets and host memory.

It has the functions that are bound, and behaves as NCCL does where tests look: operations are enqueued on a
stream and go on in a thread; those of one communicator go one after the other, whatever stream they are on; a
non-blocking communicator is in progress until it has been asked; one that failed ends by an abort only. The
ranks are processes of one host (or communicators of one process) that share a unique id.

    path = fake.build(folder)
    nccl = load(path)
    controls = fake.Controls(path)
    stream = controls.stream()
    ...                         # nccl.all_reduce(..., comm, stream.handle)
    assert stream.wait(stream.record(), timeout=10.0)

Faults are asked for by name, here or, for a child process, in its environment (:func:`environment`):

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
no process: who made it may be gone.
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

VARIABLE: Final = "KVPLUG_TEST_NCCL"
GPU_VARIABLE: Final = "KVPLUG_TEST_NCCL_GPU"
FLAGS: Final = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")

_SOURCES: Final = Path(__file__).with_name("native")


def build(folder: Path, *, old: bool = False) -> str:
    """Compile it into ``folder``, with ``CC`` or else ``cc``, and return its path.

    ``old`` leaves out what only newer releases of NCCL have.

    Raises:
        OSError: there is no compiler.
        subprocess.CalledProcessError: it does not compile.
    """
    path = folder / ("libnccl-old.so.2" if old else "libnccl.so.2")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    defined = ["-DKVPLUG_FAKE_OLD"] if old else []
    sources = [str(source) for source in sorted(_SOURCES.glob("*.c"))]
    subprocess.run(
        [*compiler, *FLAGS, *defined, "-o", str(path), *sources, "-lm"], check=True, capture_output=True
    )
    return str(path)


def environment(**values: int) -> dict[str, str]:
    """What a process needs in its environment for faults from the beginning. A wrong name ends it."""
    return {VARIABLE: ",".join(f"{name}={int(value)}" for name, value in values.items())}


class Controls:
    """The levers of the fake at ``path``, in this process."""

    def __init__(self, path: str) -> None:
        """Raises AttributeError: it is no fake."""
        library = ctypes.CDLL(path)
        handle, i64 = ctypes.c_void_p, ctypes.c_int64
        self._set = _function(library, "set", ctypes.c_int, ctypes.c_char_p, ctypes.c_long)
        self._get = _function(library, "get", ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_long))
        self._new = _function(library, "stream_new", handle)
        self._free = _function(library, "stream_free", ctypes.c_int, handle)
        self._record = _function(library, "stream_record", i64, handle)
        self._wait = _function(library, "stream_wait", ctypes.c_int, handle, i64, i64)
        self._order = _function(library, "stream_order", ctypes.c_int, handle, handle, i64)
        self._copy = _function(library, "stream_copy", ctypes.c_int, handle, handle, handle, ctypes.c_size_t)

    def set(self, **values: int) -> None:
        """From now on, for all communicators of this process. Raises LookupError: there is no such fault."""
        for name, value in values.items():
            if self._set(name.encode(), int(value)):
                raise LookupError(f"the fake has no {name}")

    def get(self, name: str) -> int:
        """Raises LookupError: there is no such fault or counter."""
        value = ctypes.c_long()
        if self._get(name.encode(), ctypes.byref(value)):
            raise LookupError(f"the fake has no {name}")
        return value.value

    def stream(self) -> Stream:
        """A new one. It has a thread, until it is closed and has done what it was given."""
        return Stream(self, self._new())

    def default_stream(self) -> Stream:
        """That of handle 0, which is there for good."""
        return Stream(self, 0)


@attrs.frozen
class Stream:
    """Work that is done in order, beside its caller. ``handle`` is what NCCL is given.

    Raises (every method but ``close``):
        ClosedError: it was closed.
    """

    _controls: Controls
    handle: int

    def record(self) -> int:
        """An event: all that was enqueued so far."""
        event = int(self._controls._record(self.handle))
        self._check(event)
        return event

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
        self._check(self._controls._order(self.handle, other.handle, event))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between two addresses, whose memory is kept alive by the caller."""
        self._check(self._controls._copy(self.handle, to, source, nbytes))

    def close(self) -> None:
        """It still does what it was given; nobody waits for that. Idempotent."""
        self._controls._free(self.handle)

    def _check(self, answer: int) -> int:
        if answer < 0:
            raise ClosedError("this stream of the fake NCCL is closed")
        return answer


def _function(library: ctypes.CDLL, name: str, returns: Any, *takes: Any) -> Any:
    function = library[f"kvplug_fake_{name}"]
    function.restype, function.argtypes = returns, takes
    return function
