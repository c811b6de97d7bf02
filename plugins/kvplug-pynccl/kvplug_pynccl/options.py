"""Options of pipe and communicator "pynccl". Light: imported by ``kvplug list``."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug.transport import option


def _library() -> Any:
    return option(
        default="",
        help="The libnccl to load; empty: what KVPLUG_NCCL_LIBRARY names, the package nvidia-nccl-cu12's,"
        " PyTorch's own, or the system's.",
    )


@attrs.frozen(kw_only=True)
class PyncclPipeOptions:
    """How much the pipe "pynccl" holds, and which NCCL it uses."""

    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Unsent bytes that send_tensor queues before it blocks. One larger message passes alone.",
    )
    copy_bytes: int = option(
        default=64 * 1024,
        unit="bytes",
        at_least=0,
        help="Tensors of up to this size are copied aside on the device, so that their memory may be"
        " overwritten before the peer receives them; larger ones are sent from where they are.",
    )
    stage_cpu_tensors: bool = option(
        default=False,
        help="Whether CPU tensors are taken too, through pinned memory; without it they are refused.",
    )
    check_order: bool = option(
        default=False,
        help="Whether this end tells its peer what it is about to receive, and the peer compares that with"
        " what it is about to send.",
    )
    library: str = _library()


@attrs.frozen(kw_only=True)
class PyncclCommunicatorOptions:
    """What the calls of the communicator "pynccl" wait for, and which NCCL it uses."""

    check_order: bool = option(
        default=False,
        help="Whether the ranks tell each other what they are about to do before each call, and refuse what"
        " does not fit; the same at every rank.",
    )
    run_ahead: int = option(
        default=0,
        unit="collectives",
        at_least=0,
        help="How many collectives may be under way on the device when a call returns. 0: none, a result is"
        " right when it is there. More: it is right once synchronize() has returned.",
    )
    library: str = _library()
