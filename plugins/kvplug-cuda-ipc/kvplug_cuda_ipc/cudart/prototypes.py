"""The functions that are bound, with the types of their results and arguments."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from kvplug_cuda_ipc.cudart.abi import IpcMemHandle, Properties

_int, _uint, _size, _address = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_to = ctypes.POINTER

PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cudaRuntimeGetVersion": (_int, _to(_int)),
    "cudaGetErrorName": (ctypes.c_char_p, _int),
    "cudaGetErrorString": (ctypes.c_char_p, _int),
    "cudaGetLastError": (_int,),
    "cudaSetDevice": (_int, _int),
    "cudaGetDeviceProperties": (_int, _to(Properties), _int),
    "cudaThreadExchangeStreamCaptureMode": (_int, _to(_int)),
    "cudaMalloc": (_int, _to(_address), _size),
    "cudaFree": (_int, _address),
    "cudaIpcGetMemHandle": (_int, _to(IpcMemHandle), _address),
    "cudaIpcOpenMemHandle": (_int, _to(_address), IpcMemHandle, _uint),
    "cudaIpcCloseMemHandle": (_int, _address),
    "cudaMemcpyAsync": (_int, _address, _address, _size, _int, _address),
    "cudaEventCreateWithFlags": (_int, _to(_address), _uint),
    "cudaEventRecord": (_int, _address, _address),
    "cudaEventQuery": (_int, _address),
    "cudaEventDestroy": (_int, _address),
    "cudaStreamWaitEvent": (_int, _address, _address, _uint),
}
"""For each, the result's type and then the arguments'."""

RENAMED: Final[dict[str, str]] = {"cudaGetDeviceProperties": "cudaGetDeviceProperties_v2"}
"""CUDA 12's header has other names for these. Either one works: their structures differ after the UUID."""
