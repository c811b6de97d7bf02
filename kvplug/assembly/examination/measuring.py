"""Measures the rate of an agreed pipe, in about a second with about 64 MiB, and compares it with the claim.

The end that dialled requests one message at a time over the channel, and measures the time from the request
until the whole message has arrived. The sizes of the messages are fixed.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.assembly.examination.finding import Finding, note, ok, problem
from kvplug.assembly.links import ControlLink
from kvplug.errors import TimeoutError, UnsupportedError
from kvplug.metrics.rate import host_load
from kvplug.net.deadline import Deadline
from kvplug.net.fork import free_locks_after_fork

if TYPE_CHECKING:
    from torch import Tensor

LABEL: Final = "doctor"
_SIZES: Final = (1 << 20, *(4 << 20,) * 16)
"""The sizes of the messages in bytes. The first one serves to touch pages and create buffers."""
_NEXT: Final = {"send": "the next message"}
_MOST_S: Final = 1.0
_CLOSE_S: Final = 1.0
_SLOW: Final = 10.0
"""Ratio of claimed to measured rate. Claims are for the usual case on common hardware, so 2 is fine."""
_FAR_TOO_SLOW: Final = 50.0

_one_at_a_time = threading.Lock()
free_locks_after_fork(sys.modules[__name__])


@attrs.frozen(kw_only=True)
class Measured:
    """The measured rate of a pipe, and the rate that its transport claims."""

    transport: str
    device: str
    gb_per_s: float
    """The rate of the fastest message, in 10^9 bytes per second."""
    claimed_gb_per_s: float
    num_bytes: int
    route: str = ""


def _bytes_on(device: str, nbytes: int) -> Tensor:
    """Make a tensor of bytes. Raise UnsupportedError if PyTorch or the device is missing here."""
    try:
        import torch

        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except (ImportError, RuntimeError, AssertionError) as e:
        raise UnsupportedError(f"{device} tensors cannot be made here: {str(e).splitlines()[0]}") from e


def lacks_tensors(device: str) -> str:
    """Return why this process cannot send tensors of that device; empty if it can."""
    try:
        _bytes_on(device, 1)
    except UnsupportedError as e:
        return str(e)
    return ""


def serve_measuring(link: ControlLink, device: str, deadline: Deadline) -> None:
    """Open the pipe and send the requested messages until the other end stops requesting.

    Raises:
        KvplugError: as opening a pipe, and sending, raise it.
    """
    content = _bytes_on(device, max(_SIZES))
    pipe = link.open_pipe(LABEL, device=device, timeout=deadline.remaining())
    try:
        sizes = iter(_SIZES)
        while link.channel.recv(timeout=deadline.remaining()) == _NEXT and (nbytes := next(sizes, 0)):
            pipe.send_tensor(content[:nbytes], timeout=deadline.remaining())
        pipe.close(timeout=_CLOSE_S)
    finally:
        pipe.abort()


def measure(link: ControlLink, device: str, claimed_gb_per_s: float, deadline: Deadline) -> Measured:
    """Measure the pipe's rate for tensors of this device. The peer must have agreed to serve this.

    Raises:
        TimeoutError: a message did not come in time.
        KvplugError: as opening a pipe, and receiving, raise it.
    """
    into = _bytes_on(device, max(_SIZES))
    pipe = link.open_pipe(LABEL, device=device, timeout=deadline.remaining())

    def one(nbytes: int) -> float:
        began = time.perf_counter()
        link.channel.send(_NEXT, timeout=deadline.remaining())
        pipe.recv_tensor(into[:nbytes], timeout=deadline.remaining())
        if into.is_cuda:
            import torch

            torch.cuda.synchronize(into.device)
        return nbytes / (time.perf_counter() - began) / 1e9

    try:
        until, rates = time.monotonic() + _MOST_S, [one(_SIZES[0])]
        while len(rates) < len(_SIZES) and time.monotonic() < until:
            rates.append(one(_SIZES[len(rates)]))
        link.channel.send({"send": "nothing"}, timeout=deadline.remaining())
        return Measured(
            transport=link.agreement.transports[device.partition(":")[0]].chosen,
            device=device,
            gb_per_s=max(rates),
            claimed_gb_per_s=claimed_gb_per_s,
            num_bytes=sum(_SIZES[: len(rates)]),
            route=pipe.route,
        )
    finally:
        pipe.abort()


def try_measuring(link: ControlLink, device: str, deadline: Deadline) -> str:
    """Serve one measurement unless another is in progress. Return why it was not served; empty if it was."""
    turn = _one_at_a_time
    if not turn.acquire(blocking=False):
        return "another doctor is measuring there now"
    try:
        lacks = lacks_tensors(device)
        link.channel.send({"measuring": not lacks, "why": lacks}, timeout=deadline.remaining())
        if not lacks:
            serve_measuring(link, device, deadline)
        return ""
    finally:
        turn.release()


def not_measured(transport: str, error: Exception, claimed: float) -> Finding:
    """Make the finding for an agreed pipe that did not open or that broke."""
    is_late = isinstance(error, TimeoutError)
    what = "no message came in time" if is_late else "the agreed pipe cannot be opened or used"
    return problem(
        "rate",
        f"{transport}: {what}; {claimed:g} GB/s are claimed",
        f"{type(error).__name__}: {error}",
        change='transport = "cpu"    (at both ends, to find out whether another one works)',
    )


def rate_finding(measured: Measured, cross_host: bool, load: float | None = None) -> Finding:
    """Make the finding that compares a pipe's rate with the claim.

    Args:
        load: runnable processes per CPU; default: those of this host.
    """
    load = host_load() if load is None else load
    # Each hand-over between the two ends waits for a turn on a CPU, and each message has several.
    allowed = (1 + load) ** 2 if load > 1 else 1.0
    factor = measured.claimed_gb_per_s / measured.gb_per_s
    what = (
        f"{measured.transport}: {measured.gb_per_s:.3g} GB/s measured with {measured.num_bytes >> 20} MiB of"
        f" {measured.device} tensors, {measured.claimed_gb_per_s:g} GB/s claimed"
    )
    if load > 1:
        what += f"; this host is busy, with {load:.1f} processes for each CPU"
    if factor < _SLOW * allowed:
        return ok("rate", what)
    if cross_host:
        why = "the network between the hosts, or the route through it, is too slow"
        return note("rate", what, why, change="host: an address of the fastest network; see `interfaces`")
    make = problem if factor >= _FAR_TOO_SLOW * allowed else note
    why = "a wrapper of the pipe, the memory, or the CPUs that the processes may use are slow"
    return make("rate", what, why, change="kvplug bench    (measures every transport here for longer)")
