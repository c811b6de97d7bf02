"""What ``nccl.h`` declares, of 2.32: codes, data types, operators, structures. A test compares the two."""

from __future__ import annotations

import ctypes
import enum
from typing import Any, Final, NamedTuple, Self


class Version(NamedTuple):
    """A version of NCCL. ``str`` gives ``2.32.3``."""

    major: int
    minor: int
    patch: int

    @classmethod
    def of(cls, code: int) -> Self:
        """From ``NCCL_VERSION_CODE``, which has had a digit more since 2.9."""
        step = 10000 if code >= 10000 else 1000
        return cls(code // step, code % step // 100, code % 100)

    @property
    def code(self) -> int:
        step = 10000 if (self.major, self.minor) > (2, 8) else 1000
        return self.major * step + self.minor * 100 + self.patch

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


HEADER: Final = Version(2, 32, 3)
"""The header that this module was written from."""


class Result(enum.IntEnum):
    """``ncclResult_t``."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class DataType(enum.IntEnum):
    """``ncclDataType_t``."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11

    @property
    def nbytes(self) -> int:
        return _BYTES[self]


class RedOp(enum.IntEnum):
    """``ncclRedOp_t``, the operators that every communicator has."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class SuspendFlag(enum.IntFlag):
    """``NCCL_SUSPEND_*``: what a suspended communicator gives back."""

    MEM = 0x01


_BYTES: Final = {
    **dict.fromkeys((DataType.INT8, DataType.UINT8, DataType.FLOAT8E4M3, DataType.FLOAT8E5M2), 1),
    **dict.fromkeys((DataType.FLOAT16, DataType.BFLOAT16), 2),
    **dict.fromkeys((DataType.INT32, DataType.UINT32, DataType.FLOAT32), 4),
    **dict.fromkeys((DataType.INT64, DataType.UINT64, DataType.FLOAT64), 8),
}

UNIQUE_ID_BYTES: Final = 128
API_MAGIC: Final = 0xCAFEBEEF
UNDEFINED: Final = -(2**31)
"""``NCCL_CONFIG_UNDEF_INT``: NCCL decides."""


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: what the ranks of a communicator find each other by. ``bytes`` gives what to send."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Raises ValueError: these are not 128 bytes."""
        if len(data) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id of NCCL has {UNIQUE_ID_BYTES} bytes, these are {len(data)}")
        return cls.from_buffer_copy(data)


class Config(ctypes.Structure):
    """``ncclConfig_t``. Made with nothing set, as ``NCCL_CONFIG_INITIALIZER`` does.

    An older NCCL reads no further than the structure it knows, and a newer one no further than ``size``.
    """

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int),
        ("graphUsageMode", ctypes.c_int),
        ("numRmaCtx", ctypes.c_int),
        ("maxP2pPeers", ctypes.c_int),
        ("graphStreamOrdering", ctypes.c_int),
        ("launchOrderImplicit", ctypes.c_int),
        ("numRmaSig", ctypes.c_int),
        ("rmaEagerInit", ctypes.c_int),
        ("hostCftMode", ctypes.c_int),
        ("nvlsHostMode", ctypes.c_int),
    )

    def __init__(self, *, version: Version = HEADER, **values: Any) -> None:
        """Raises TypeError: the structure has no such field."""
        names = [name for name, _ in self._fields_[3:]]
        if unknown := values.keys() - {*names}:
            raise TypeError(f"ncclConfig_t has no {', '.join(sorted(unknown))}; it has {', '.join(names)}")
        unset = {name: UNDEFINED for name, kind in self._fields_[3:] if kind is ctypes.c_int}
        super().__init__(
            size=ctypes.sizeof(type(self)), magic=API_MAGIC, version=version.code, **{**unset, **values}
        )
