"""Options of the pipe "cuda-ipc". Light: imported by ``kvplug list``."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class CudaIpcPipeOptions:
    """How much memory the pipe "cuda-ipc" takes, and which CUDA runtime it loads."""

    staging_bytes: int = option(
        default=64 * 1024 * 1024,
        unit="bytes",
        at_least=2 * 1024 * 1024,
        help="GPU memory that each pipe allocates for sending, and its peer maps. Rounded up to whole"
        " multiples of 2 MiB.",
    )
    piece_bytes: int = option(
        default=8 * 1024 * 1024,
        unit="bytes",
        at_least=4096,
        help="Messages are copied in pieces of up to this size, so that both ends copy at the same time. At"
        " most half of staging_bytes is used.",
    )
    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="send_tensor blocks while more bytes than this are sent and not yet received. A single larger"
        " message is sent alone.",
    )
    library: str = option(
        default="",
        help="Path of the libcudart to load. If empty, the one that KVPLUG_CUDART_LIBRARY names, else the one"
        " that PyTorch has loaded, else the system's.",
    )
