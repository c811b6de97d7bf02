"""What a measured rate means beside the one that a transport claims."""

from __future__ import annotations

from typing import Final

from kvplug.assembly.examination.finding import Finding, Verdict
from kvplug.assembly.examination.measuring import Measured
from kvplug.errors import TimeoutError
from kvplug.metrics.rate import host_load

_SLOW: Final = 10.0
"""Claimed rate over measured one. Claims are for the usual case on common hardware, so half of it is fine."""
_FAR_TOO_SLOW: Final = 50.0


def not_measured(transport: str, error: Exception, claimed: float) -> Finding:
    """The pipe that was agreed on did not open, or broke."""
    if isinstance(error, TimeoutError):
        what = "no message came in time"
    else:
        what = "the pipe that was agreed on cannot be opened or used"
    return Finding(
        topic="rate",
        verdict="problem",
        what=f"{transport}: {what}; {claimed:g} GB/s are claimed",
        why=(f"{type(error).__name__}: {error}",),
        change='transport = "cpu"    (at both ends, to find out whether another one works)',
    )


def rate_finding(measured: Measured, cross_host: bool, load: float | None = None) -> Finding:
    """Whether a pipe is as fast as claimed.

    Args:
        load: processes that want to run, for each CPU; default: of this host.
    """
    load = host_load() if load is None else load
    # Each hand-over between the two ends waits for a turn, and there are several in a message.
    allowed = (1 + load) ** 2 if load > 1 else 1.0
    factor = measured.claimed_gb_per_s / measured.gb_per_s
    what = (
        f"{measured.transport}: {measured.gb_per_s:.3g} GB/s measured with {measured.num_bytes >> 20} MiB of"
        f" {measured.device} tensors, {measured.claimed_gb_per_s:g} GB/s claimed"
    )
    if load > 1:
        what += f"; this host is busy, with {load:.1f} processes for each CPU"
    if factor < _SLOW * allowed:
        return Finding(topic="rate", verdict="ok", what=what)
    if cross_host:
        why = "the network between the hosts, or the way that was taken through it, carries no more"
        change = "host: an address of the fastest network; see `interfaces`"
    else:
        why = "a wrapper of the pipe, memory, or CPUs that the processes may use are slow"
        change = "kvplug bench    (measures every transport here for longer)"
    verdict: Verdict = "problem" if factor >= _FAR_TOO_SLOW * allowed and not cross_host else "note"
    return Finding(topic="rate", verdict=verdict, what=what, why=(why,), change=change)
