"""Options of pipe and communicator "pynccl". Light: imported by ``kvplug list``."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug.transport import option


def _library() -> Any:
    return option(
        default="",
        help="Path of the libnccl to load. Empty: the one that KVPLUG_NCCL_LIBRARY names, else that of the"
        " package nvidia-nccl-cu12, PyTorch's, or the system's.",
    )


@attrs.frozen(kw_only=True)
class PyncclPipeOptions:
    """How the pipe "pynccl" queues, copies and checks messages, and which NCCL it uses."""

    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="send_tensor blocks while more bytes than this are queued or not yet received. A single larger"
        " message is sent alone.",
    )
    copy_bytes: int = option(
        default=64 * 1024,
        unit="bytes",
        at_least=0,
        help="Copy tensors of up to this size on the GPU, so that their memory may be overwritten before the"
        " peer receives them. Larger ones are sent from where they are.",
    )
    stage_cpu_tensors: bool = option(
        default=False,
        help="Accept CPU tensors too, and stage them through pinned memory. Without it they are refused.",
    )
    library: str = _library()


@attrs.frozen(kw_only=True)
class PyncclCommunicatorOptions:
    """Whether the communicator "pynccl" compares calls and runs ahead, and which NCCL it uses."""

    check_order: bool = option(
        default=False,
        help="Compare each call at all ranks before it starts, and refuse calls that do not match. Costs a"
        " round trip per call. Must be the same at every rank.",
    )
    run_ahead: int = option(
        default=0,
        unit="collectives",
        at_least=0,
        help="Collectives that may be in flight on the GPU when a call returns. 0: a call returns when its"
        " result is complete. More: results are complete once synchronize() has returned.",
    )
    library: str = _library()
