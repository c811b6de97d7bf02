"""The errors that results of NCCL are raised as. ``ncclInProgress`` is not an error."""

from __future__ import annotations

from typing import Final

from kvplug import PeerGoneError, TimeoutError, TransportError
from kvplug_pynccl.nccl.abi import Result


class NcclLibraryError(TransportError):
    """No NCCL can be used. The message lists the places that were tried, and why each of them failed."""


class NcclError(TransportError):
    """A function of NCCL or a communicator failed. ``result`` is the number that ``function`` returned."""

    def __init__(self, text: str, *, result: int, function: str) -> None:
        self.result = result
        self.function = function
        super().__init__(text)


class NcclCudaError(NcclError):
    """A call of CUDA failed: no GPU, no driver for this NCCL, no memory, or a kernel that failed before."""


class NcclSystemError(NcclError):
    """A call of the system failed: a connection, shared memory, descriptors."""


class NcclInternalError(NcclError):
    """NCCL contradicts itself."""


class NcclInvalidArgumentError(NcclError, ValueError):
    """An argument is wrong, or the communicator is not ready for the call."""


class NcclInvalidUsageError(NcclError, ValueError):
    """The calls are right one by one and wrong together: two ranks on one GPU, ranks that disagree."""


class NcclRemoteError(NcclError, PeerGoneError):
    """Another rank ended, or cannot be reached any more."""


class NcclTimeoutError(NcclError, TimeoutError):
    """NCCL itself waited too long."""


_ERRORS: Final[dict[int, type[NcclError]]] = {
    Result.UNHANDLED_CUDA_ERROR: NcclCudaError,
    Result.SYSTEM_ERROR: NcclSystemError,
    Result.INTERNAL_ERROR: NcclInternalError,
    Result.INVALID_ARGUMENT: NcclInvalidArgumentError,
    Result.INVALID_USAGE: NcclInvalidUsageError,
    Result.REMOTE_ERROR: NcclRemoteError,
    Result.TIMEOUT: NcclTimeoutError,
}

_MEANINGS: Final[dict[int, str]] = {
    Result.UNHANDLED_CUDA_ERROR: """
        a call of CUDA failed: there is no GPU, its driver is too old for this NCCL, its memory is full, or a
        kernel failed before""",
    Result.SYSTEM_ERROR: """
        a call of the system failed: a connection to another rank broke or was refused, or shared memory or
        descriptors have run out""",
    Result.INTERNAL_ERROR: """
        NCCL contradicts itself: ranks with different releases of NCCL, or other NCCL_ variables, do that""",
    Result.INVALID_ARGUMENT: """
        an argument is wrong: memory of another device than the communicator's, a rank that it does not have,
        a communicator that is not ready yet or was destroyed""",
    Result.INVALID_USAGE: """
        NCCL does not allow it: most often two ranks have the same GPU (each needs one of its own), or the
        ranks do not agree on the world size, the unique id, or what they call""",
    Result.REMOTE_ERROR: """
        another rank ended, or the network to it failed; the communicator can only be aborted now""",
    Result.TIMEOUT: """
        NCCL waited longer than it is set to; the communicator can only be aborted now""",
}


def error_of(result: int, function: str, said: str = "") -> NcclError:
    """Return the error for a result. ``said`` is NCCL's own text, which the message includes."""
    kind = _ERRORS.get(result, NcclError)
    meaning = " ".join(_MEANINGS.get(result, "a result that kvplug-pynccl does not know").split())
    said = " ".join(said.split()).rstrip(".")
    detail = f" NCCL says: {said}." if said else ""
    text = f"{function} gave {_name(result)}: {meaning}.{detail} NCCL_DEBUG=WARN shows more"
    error = kind(text, result=result, function=function)
    if kind in (NcclSystemError, NcclCudaError):
        error.__cause__ = RuntimeError(said)  # NamedExhaustion recognises what ran out by it
    return error


def _name(result: int) -> str:
    try:
        parts = Result(result).name.split("_")
    except ValueError:
        return f"result {result}"
    return "nccl" + "".join(part.capitalize() for part in parts)
