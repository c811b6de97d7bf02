"""Constants and structures of ``driver_types.h`` and ``cuda_runtime_api.h``, as of CUDA 10 and later."""

from __future__ import annotations

import ctypes
import enum
from typing import Final

IPC_HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16
UUID_AT: Final = 256
"""The offset of the UUID in ``cudaDeviceProp``, whose rest differs by release."""
PROPERTIES_BYTES: Final = 4096
"""Larger than ``cudaDeviceProp`` is in any release."""


class Result(enum.IntEnum):
    """The values of ``cudaError_t`` that this binding treats specially."""

    SUCCESS = 0
    INVALID_VALUE = 1
    MEMORY_ALLOCATION = 2
    INITIALIZATION_ERROR = 3
    STUB_LIBRARY = 34
    INSUFFICIENT_DRIVER = 35
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    DEVICE_UNINITIALIZED = 201
    MAP_BUFFER_OBJECT_FAILED = 205
    PEER_ACCESS_UNSUPPORTED = 217
    INVALID_RESOURCE_HANDLE = 400
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    TOO_MANY_PEERS = 711
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900


class MemcpyKind(enum.IntEnum):
    """``cudaMemcpyKind``: CUDA finds out from the addresses."""

    DEFAULT = 4


class CaptureMode(enum.IntEnum):
    """``cudaStreamCaptureMode``."""

    RELAXED = 2


class EventFlag(enum.IntFlag):
    DISABLE_TIMING = 0x02


class IpcFlag(enum.IntFlag):
    LAZY_ENABLE_PEER_ACCESS = 0x01


class IpcMemHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)

    @classmethod
    def of(cls, data: bytes) -> IpcMemHandle:
        """Raises ValueError: it is of another size."""
        if len(data) != IPC_HANDLE_BYTES:
            raise ValueError(f"a memory handle has {IPC_HANDLE_BYTES} bytes, not {len(data)}")
        return cls.from_buffer_copy(data)


class Properties(ctypes.Structure):
    """The beginning of ``cudaDeviceProp``, and room for all of it."""

    _fields_ = (
        ("name", ctypes.c_char * UUID_AT),
        ("uuid", ctypes.c_ubyte * UUID_BYTES),
        ("rest", ctypes.c_ubyte * (PROPERTIES_BYTES - UUID_AT - UUID_BYTES)),
    )
