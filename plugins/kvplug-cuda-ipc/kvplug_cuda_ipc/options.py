"""Options of the pipe "cuda-ipc". Light: imported by ``kvplug list``."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class CudaIpcPipeOptions:
    """How much the pipe "cuda-ipc" holds."""

    staging_bytes: int = option(
        default=64 * 1024 * 1024,
        unit="bytes",
        at_least=2 * 1024 * 1024,
        help="Memory of this end's GPU that each pipe takes for what it sends, and its peer maps. In whole"
        " pieces of 2 MiB.",
    )
    piece_bytes: int = option(
        default=8 * 1024 * 1024,
        unit="bytes",
        at_least=4096,
        help="Messages are copied in pieces of up to this size, so that both ends copy at the same time; no"
        " more than half of staging_bytes.",
    )
    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Bytes not yet received that send_tensor queues before it blocks. One larger message passes"
        " alone.",
    )
    library: str = option(
        default="",
        help="The libcudart to load; empty: what KVPLUG_CUDART_LIBRARY names, the one that PyTorch has"
        " loaded, or the system's.",
    )
