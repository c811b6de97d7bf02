"""A ``libcudart`` for tests, without a GPU: compiled from C as it is needed.

Device memory is shared memory, which another process maps by its handle, and nobody else's process may: a
process cannot open its own. Streams are threads. ``cudaFree`` waits for all of them, as CUDA's does, and what
was freed is overwritten.

    path = fake.build(folder)
    runtime = load(path)
    controls = fake.Controls(path)
    stream = controls.stream()
    runtime.memcpy_async(to, source, nbytes, stream)
    controls.close_stream(stream)

Faults are asked for by name, here or, for a child process, in its environment (:func:`environment`):

====================== ========== =========================================================================
name                   default
====================== ========== =========================================================================
``version``            12090      what ``cudaRuntimeGetVersion`` gives
``devices``            1          how many GPUs there are
``gpu``                1          which GPU device 0 is; two processes with the same number have the same
``hold``               0          1: what streams are given does not begin
``gate``               0          1: a stream does not go on from where it was given a gate
``capturing``          0          1: a thread captures a graph, and others must not disturb it
``delay_us``           0          each copy takes so much longer
``malloc_result``      0          what ``cudaMalloc`` gives, if it is not 0
``open_result``        0          what ``cudaIpcOpenMemHandle`` gives, if it is not 0
``copy_result``        0          what ``cudaMemcpyAsync`` gives at once, if it is not 0
``fail_after``         -1         when so many copies are done, the device fails, for good
``fail_result``        700        what it fails with
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

VARIABLE: Final = "KVPLUG_TEST_CUDART"
FLAGS: Final = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")

_SOURCES: Final = Path(__file__).with_name("native")


def build(folder: Path) -> str:
    """Compile it into ``folder``, with ``CC`` or else ``cc``, and return its path.

    Raises:
        OSError: there is no compiler.
        subprocess.CalledProcessError: it does not compile.
    """
    path = folder / "libcudart.so.12"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    sources = [str(source) for source in sorted(_SOURCES.glob("*.c"))]
    subprocess.run([*compiler, *FLAGS, "-o", str(path), *sources], check=True, capture_output=True)
    return str(path)


def environment(**values: int) -> dict[str, str]:
    """What a process needs in its environment for faults from the beginning. A wrong name ends it."""
    return {VARIABLE: ",".join(f"{name}={int(value)}" for name, value in values.items())}


class Controls:
    """The levers of the fake at ``path``, in this process."""

    def __init__(self, path: str) -> None:
        """Raises AttributeError: it is no fake."""
        library = ctypes.CDLL(path)
        self._set = _function(library, "set", ctypes.c_int, ctypes.c_char_p, ctypes.c_long)
        self._get = _function(library, "get", ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_long))
        self._new = _function(library, "stream_new", ctypes.c_void_p)
        self._free = _function(library, "stream_free", None, ctypes.c_void_p)
        self._gate = _function(library, "stream_gate", None, ctypes.c_void_p)
        self._heal = _function(library, "heal", None)

    def set(self, **values: int) -> None:
        """From now on, for this process. Raises LookupError: there is no such fault."""
        for name, value in values.items():
            if self._set(name.encode(), int(value)):
                raise LookupError(f"the fake has no {name}")

    def get(self, name: str) -> int:
        """Raises LookupError: there is no such fault or counter."""
        value = ctypes.c_long()
        if self._get(name.encode(), ctypes.byref(value)):
            raise LookupError(f"the fake has no {name}")
        return value.value

    def stream(self) -> int:
        """The handle of a new one. It has a thread, until it is closed and has done what it was given."""
        return int(self._new())

    def close_stream(self, handle: int) -> None:
        """It still does what it was given; nobody waits for that. Idempotent."""
        self._free(handle)

    def put_gate(self, handle: int) -> None:
        """What the stream is given from now on begins when ``gate`` is 0."""
        self._gate(handle)

    def heal(self) -> None:
        """A device that has failed works again, as in a new process."""
        self._heal()


def _function(library: ctypes.CDLL, name: str, returns: Any, *takes: Any) -> Any:
    function = library[f"kvplug_fake_{name}"]
    function.restype, function.argtypes = returns, takes
    return function
