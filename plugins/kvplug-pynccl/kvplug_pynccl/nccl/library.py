"""NCCL itself, loaded with ctypes: each function as a method that raises what NCCL's result means.

Every call releases the interpreter's lock. A communicator is the address that NCCL gave for it, a stream that
of a ``cudaStream_t`` (0: the default one), memory the address of its first byte (``tensor.data_ptr()``).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable
from typing import Any, Final

from kvplug import UnsupportedError
from kvplug.transport import BackgroundThread, NamedExhaustion
from kvplug_pynccl.nccl.abi import (
    HEADER,
    Config,
    DataType,
    RedOp,
    Result,
    SuspendFlag,
    UniqueId,
    Version,
)
from kvplug_pynccl.nccl.elf import missing_bytes
from kvplug_pynccl.nccl.errors import NcclError, NcclLibraryError, error_of
from kvplug_pynccl.nccl.places import PACKAGE, VARIABLE, places
from kvplug_pynccl.nccl.prototypes import MIN_VERSION, OPTIONAL, PROTOTYPES

logger = logging.getLogger(__name__)

_GOES_ON: Final = (Result.SUCCESS, Result.IN_PROGRESS)


def load(path: str = "") -> Library:
    """Load the NCCL at ``path``, or that of ``KVPLUG_NCCL_LIBRARY``, or that of the package, or torch's.

    What NCCL reads from the environment (``NCCL_SOCKET_IFNAME``) it reads once in a process, at the first
    call that needs it: set it before.

    Raises:
        NcclLibraryError: no NCCL can be used. A path that was given is the only one that is tried.
        ResourceExhaustedError: this process has no descriptor or memory to look for one.
    """
    tried = []
    for place in places(path):
        if place.missing:
            tried.append(f"{place.what}: {place.missing}")
            continue
        try:
            library = Library(place.path)
        except NcclLibraryError as e:
            tried.append(f"{place.what}: {e}")
            continue
        logger.debug("NCCL %s is %s (%s)", library.version, place.path, place.what)
        return library
    if len(tried) == 1:
        raise NcclLibraryError(f"no NCCL can be used; {tried[0]}")
    lines = "".join(f"\n  - {each}" for each in tried)
    raise NcclLibraryError(f"no NCCL can be used; install {PACKAGE}, or name a library by {VARIABLE}:{lines}")


class Library:
    """One ``libnccl``. :func:`load` finds it.

    For a non-blocking communicator a method returns ``Result.SUCCESS`` or ``Result.IN_PROGRESS``, which is
    not an error: poll :meth:`comm_get_async_error` until it is over, and call nothing else before.

    Raises (every method that calls NCCL):
        NcclError: it failed; the class says how, see :mod:`kvplug_pynccl.nccl.errors`.
        UnsupportedError: this NCCL has no such function.
    """

    def __init__(self, path: str) -> None:
        """Raises NcclLibraryError: it is not a library, not NCCL, or too old."""
        self.path = path
        loaded = _loaded(path)
        self._kept_alive: dict[int, list[object]] = {}
        """Memory that NCCL uses after the call that passed it has returned, by communicator."""
        self._functions = {name: _bound(loaded, name) for name in PROTOTYPES if hasattr(loaded, name)}
        if lacks := [name for name in PROTOTYPES if name not in self._functions and name not in OPTIONAL]:
            names = ", ".join(lacks[:3]) + (", ..." if len(lacks) > 3 else "")
            if "ncclGetVersion" in lacks:
                raise NcclLibraryError(f"{path} is not NCCL: it lacks {names}")
            raise NcclLibraryError(f"{path} is NCCL {self._version()}, and lacks {names}")
        self.version: Version = self._version()
        if self.version < MIN_VERSION:
            raise NcclLibraryError(
                f"{path} is NCCL {self.version}, and {MIN_VERSION} is the oldest that can be used"
            )

    def __repr__(self) -> str:
        return f"<NCCL {self.version} of {self.path}>"

    def has(self, function: str) -> bool:
        """Whether this NCCL has a function, such as ``ncclCommSuspend``."""
        return function in self._functions

    def config(self, **values: Any) -> Config:
        """Make an ``ncclConfig_t`` for this NCCL with ``values``. Raises TypeError: it has no such field."""
        return Config(version=min(self.version, HEADER), **values)

    # -- what needs no communicator --------------------------------------------------------------------

    def get_last_error(self, comm: int = 0) -> str:
        """Return the last warning of the communicators of this process; empty without one."""
        return _text(self._function("ncclGetLastError")(comm or None)).strip()

    def get_unique_id(self) -> UniqueId:
        """Make an id for one communicator. The process listens from then on, see ``NCCL_SOCKET_IFNAME``."""
        unique_id = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return unique_id

    def group_start(self) -> Result:
        """Collect this thread's calls until :meth:`group_end`, which makes them one operation."""
        return self._call("ncclGroupStart")

    def group_end(self) -> Result:
        return self._call("ncclGroupEnd")

    # -- a communicator's life -------------------------------------------------------------------------

    def comm_init_rank(self, world_size: int, unique_id: UniqueId, rank: int) -> int:
        """Make a communicator on the current device. Blocks until all ranks are there, without a deadline."""
        comm = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(comm), world_size, unique_id, rank)
        return self._keep_alive(comm.value or 0, comm)

    def comm_init_rank_config(
        self, world_size: int, unique_id: UniqueId, rank: int, config: Config
    ) -> tuple[int, Result]:
        """With ``blocking=0`` it returns at once: poll :meth:`comm_get_async_error`, or abort."""
        comm = ctypes.c_void_p()
        try:
            result = self._call(
                "ncclCommInitRankConfig",
                ctypes.byref(comm),
                world_size,
                unique_id,
                rank,
                ctypes.byref(config),
            )
        except NcclError:
            if comm.value:  # it exists, and failed: only this call has its address
                BackgroundThread(
                    self._abort_unseen,
                    args=(comm, config),
                    name="kvplug-pynccl-abort",
                    stop=lambda: None,  # nothing ends a call of NCCL
                ).start()
            raise
        return self._keep_alive(comm.value or 0, comm, config), result

    def comm_get_async_error(self, comm: int) -> Result | int:
        """Return the communicator's state. A failure is returned, not raised; see :meth:`raise_for`."""
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return _result(state.value)

    def raise_for(self, state: int, what: str, comm: int = 0) -> Result:
        """Raise the error for a state of a communicator that has failed. ``what`` names the call in the
        message."""
        if state in _GOES_ON:
            return Result(state)
        raise error_of(state, what, self.get_last_error(comm))

    def comm_abort(self, comm: int) -> Result:
        """End it at once: what the device is doing for it ends undone. Frees the communicator."""
        return self._freed(comm, self._call("ncclCommAbort", comm))

    def comm_destroy(self, comm: int) -> Result:
        """Free the communicator. Waits for its operations."""
        return self._freed(comm, self._call("ncclCommDestroy", comm))

    def comm_suspend(self, comm: int, flags: int = SuspendFlag.MEM) -> Result:
        return self._call("ncclCommSuspend", comm, flags)

    def comm_resume(self, comm: int) -> Result:
        return self._call("ncclCommResume", comm)

    # -- operations: enqueued on the stream, and not done when the call returns ------------------------------

    def all_reduce(
        self, sendbuff: int, recvbuff: int, count: int, dtype: DataType, op: RedOp, comm: int, stream: int
    ) -> Result:
        return self._call("ncclAllReduce", sendbuff, recvbuff, count, dtype, op, comm, stream)

    def reduce(
        self,
        sendbuff: int,
        recvbuff: int,
        count: int,
        dtype: DataType,
        op: RedOp,
        root: int,
        comm: int,
        stream: int,
    ) -> Result:
        return self._call("ncclReduce", sendbuff, recvbuff, count, dtype, op, root, comm, stream)

    def all_gather(
        self, sendbuff: int, recvbuff: int, sendcount: int, dtype: DataType, comm: int, stream: int
    ) -> Result:
        """``sendcount`` is one rank's; ``recvbuff`` holds as much of each, in the order of ranks."""
        return self._call("ncclAllGather", sendbuff, recvbuff, sendcount, dtype, comm, stream)

    def reduce_scatter(
        self, sendbuff: int, recvbuff: int, recvcount: int, dtype: DataType, op: RedOp, comm: int, stream: int
    ) -> Result:
        """``recvcount`` is one rank's; ``sendbuff`` holds as much for each, in the order of ranks."""
        return self._call("ncclReduceScatter", sendbuff, recvbuff, recvcount, dtype, op, comm, stream)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, dtype: DataType, root: int, comm: int, stream: int
    ) -> Result:
        return self._call("ncclBroadcast", sendbuff, recvbuff, count, dtype, root, comm, stream)

    def send(self, sendbuff: int, count: int, dtype: DataType, peer: int, comm: int, stream: int) -> Result:
        return self._call("ncclSend", sendbuff, count, dtype, peer, comm, stream)

    def recv(self, recvbuff: int, count: int, dtype: DataType, peer: int, comm: int, stream: int) -> Result:
        return self._call("ncclRecv", recvbuff, count, dtype, peer, comm, stream)

    # -- how it is called ------------------------------------------------------------------------------

    def _version(self) -> Version:
        code = ctypes.c_int()
        result = self._functions["ncclGetVersion"](ctypes.byref(code))
        if result != Result.SUCCESS:
            raise NcclLibraryError(f"{self.path} does not tell its version: ncclGetVersion gave {result}")
        return Version.of(code.value)

    def _abort_unseen(self, comm: ctypes.c_void_p, config: Config) -> None:
        """In a thread of its own: it may hang, and NCCL uses ``comm`` and ``config`` until it returns."""
        with contextlib.suppress(NcclError):
            self.comm_abort(comm.value or 0)
        del config

    def _keep_alive(self, comm: int, *things: object) -> int:
        self._kept_alive.setdefault(comm, []).extend(things)
        return comm

    def _freed(self, comm: int, result: Result) -> Result:
        self._kept_alive.pop(comm, None)
        return result

    def _function(self, name: str) -> Callable[..., Any]:
        try:
            return self._functions[name]
        except KeyError:
            raise UnsupportedError(
                f"{name} came with NCCL {OPTIONAL[name]}, and {self.path} is NCCL {self.version}"
            ) from None

    def _call(self, name: str, *args: Any) -> Result:
        result = self._function(name)(*args)
        if result in _GOES_ON:
            return Result(result)
        raise error_of(result, name, self.get_last_error())


def _loaded(path: str) -> ctypes.CDLL:
    try:
        lacking = missing_bytes(path) if "/" in path else 0  # the loader looks for a bare name
        if not lacking:
            return ctypes.CDLL(path)
    except OSError as e:
        NamedExhaustion.check(e, f"loading {path}")
        raise NcclLibraryError(f"{path} cannot be loaded: {e}") from e
    raise NcclLibraryError(f"{path} is incomplete: {lacking} bytes are missing at its end")


def _bound(loaded: ctypes.CDLL, name: str) -> Callable[..., Any]:
    function = loaded[name]
    function.restype, *function.argtypes = PROTOTYPES[name]
    return function


def _result(code: int) -> Result | int:
    try:
        return Result(code)
    except ValueError:
        return code


def _text(said: bytes | None) -> str:
    return (said or b"").decode("utf-8", "replace")
