"""The functions that are bound: what they return and take, and since when they are there."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from kvplug_pynccl.nccl.abi import Config, UniqueId, Version

MIN_VERSION: Final = Version(2, 20, 0)
"""The oldest NCCL that is used: the one of the oldest PyTorch that kvplug supports."""

FLOAT8_SINCE: Final = Version(2, 24, 0)

_RESULT, _INT, _SIZE, _TEXT = ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
_POINTER = _COMM = _STREAM = ctypes.c_void_p
_TYPE, _OP = ctypes.c_int, ctypes.c_int
_TO_INT, _TO_COMM = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
_TO_RESULT = _TO_INT

PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    # name: (what it returns, its arguments)
    "ncclGetLastError": (_TEXT, _COMM),
    "ncclGetVersion": (_RESULT, _TO_INT),
    "ncclGetUniqueId": (_RESULT, ctypes.POINTER(UniqueId)),
    "ncclCommInitRank": (_RESULT, _TO_COMM, _INT, UniqueId, _INT),
    "ncclCommInitRankConfig": (_RESULT, _TO_COMM, _INT, UniqueId, _INT, ctypes.POINTER(Config)),
    "ncclCommGetAsyncError": (_RESULT, _COMM, _TO_RESULT),
    "ncclCommAbort": (_RESULT, _COMM),
    "ncclCommDestroy": (_RESULT, _COMM),
    "ncclAllReduce": (_RESULT, _POINTER, _POINTER, _SIZE, _TYPE, _OP, _COMM, _STREAM),
    "ncclReduce": (_RESULT, _POINTER, _POINTER, _SIZE, _TYPE, _OP, _INT, _COMM, _STREAM),
    "ncclAllGather": (_RESULT, _POINTER, _POINTER, _SIZE, _TYPE, _COMM, _STREAM),
    "ncclReduceScatter": (_RESULT, _POINTER, _POINTER, _SIZE, _TYPE, _OP, _COMM, _STREAM),
    "ncclBroadcast": (_RESULT, _POINTER, _POINTER, _SIZE, _TYPE, _INT, _COMM, _STREAM),
    "ncclSend": (_RESULT, _POINTER, _SIZE, _TYPE, _INT, _COMM, _STREAM),
    "ncclRecv": (_RESULT, _POINTER, _SIZE, _TYPE, _INT, _COMM, _STREAM),
    "ncclGroupStart": (_RESULT,),
    "ncclGroupEnd": (_RESULT,),
    "ncclCommSuspend": (_RESULT, _COMM, _INT),
    "ncclCommResume": (_RESULT, _COMM),
}

OPTIONAL: Final[dict[str, Version]] = {
    # name: the first release that has it
    "ncclCommSuspend": Version(2, 29, 7),
    "ncclCommResume": Version(2, 29, 7),
}
