"""Warnings about slow pipes and stores: the measured rate, the expected rate, and likely causes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import attrs

from kvplug.assembly.host import SHARED_MEMORY, interfaces
from kvplug.config.addresses import Address
from kvplug.config.config import Config
from kvplug.errors import SlowPathError
from kvplug.metrics.rate import (
    CLAIM_FACTOR,
    REFUSED_S,
    PathWatch,
    Rate,
    SlowRate,
    StoreOp,
    StoreWatch,
    host_load,
)
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.agreement import Agreement
from kvplug.negotiation.select import REFERENCE_NBYTES
from kvplug.net.fork import free_locks_after_fork
from kvplug.transport.capabilities import Capabilities
from kvplug.transport.pipe import Pipe
from kvplug.transport.store.store import Store

_log = logging.getLogger(__name__)

_MOST_PEERS: Final = 1024
_SMALL_SHM: Final = 64 << 20
_FEW_CPUS: Final = 2.0
_NET: Final = Path("/sys/class/net")
_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")
_STORE_WORDS: Final[Mapping[StoreOp, tuple[str, str]]] = {
    "get": ("loading from", "loads nothing from it"),
    "put": ("saving to", "saves nothing to it"),
}

_rates: Final[WeakValueDictionary[tuple[str, str, str, Capabilities.Cost | None], Rate]] = (
    WeakValueDictionary()
)
"""The rates of open pipes, and those remembered, by peer, transport, device and claim."""
_rates_lock = threading.Lock()
free_locks_after_fork(sys.modules[__name__])


@functools.lru_cache(_MOST_PEERS)
def _remember(rate: Rate) -> None:
    """Keep a path's measured rate after its pipes close, because programs often reopen pipes to one peer.

    The rate of a peer that was sent little data is not kept."""


def _rate_of(peer: str, transport: str, device: str, claim: Capabilities.Cost | None) -> Rate:
    key = (peer, transport, device, claim)
    with _rates_lock:  # two pipes may open at the same time
        if (rate := _rates.get(key)) is None:
            rate = _rates[key] = Rate(claim, on_known=_remember)
        elif rate.is_known:  # the most recently used rates are remembered
            _remember(rate)
    return rate


os.register_at_fork(after_in_child=_rates.clear)
os.register_at_fork(after_in_child=_remember.cache_clear)


@attrs.frozen(kw_only=True)
class SlowPathAlarm:
    """Compares one pipe's rate with the expected one, and warns of and counts slow paths."""

    config: Config
    stats: TransferStats
    abilities: Callable[[], Mapping[str, Capabilities]]
    """Returns the capabilities of the transports installed here, by name."""
    agreement: Agreement
    transport: str
    device: str
    wrapped_by: str = ""
    """The configured wrapper of the transport; empty if there is none."""

    def watch(self, pipe: Pipe) -> PathWatch | None:
        """Begin to compare the pipe's rate. Return ``None`` if the config turns the comparison off.

        Raises:
            SlowPathError: the transport measured a rate that is too low, and the config refuses slow paths.
        """
        if self.config.slow_path == "off":
            return None
        report = _report_of(pipe)
        claim = self._claim()
        expected = report.expected_gb_per_s
        if expected is not None and claim is not None:
            claim = attrs.evolve(claim, gb_per_s=expected) if expected else None
        remote = self.agreement.remote
        rate = _rate_of(remote.engine_id or str(remote.identity), self.transport, self.device, claim)
        measured = report.measured_gb_per_s
        if measured is not None and claim is not None and measured * CLAIM_FACTOR < claim.gb_per_s:
            at_once = SlowRate(gb_per_s=measured, expected_gb_per_s=claim.gb_per_s)
            if refusal := self._alarm(at_once, pipe, rate):
                raise refusal
        return PathWatch(rate, lambda found: self._alarm(found, pipe, rate))

    def _claim(self) -> Capabilities.Cost | None:
        """Return the claim of the end with the higher cost, as the selection does."""
        ends = (self.abilities(), self._theirs())
        claims = [able[self.transport].cost for able in ends if self.transport in able]
        return max(claims, key=lambda cost: cost.seconds(REFERENCE_NBYTES), default=None)

    def _theirs(self) -> dict[str, Capabilities]:
        return {offer.name: offer.capabilities for offer in self.agreement.remote.transports}

    def _alarm(self, found: SlowRate, pipe: Pipe, rate: Rate) -> SlowPathError | None:
        refuses = self.config.slow_path == "refuse"
        if rate.is_first_alarm():
            self.stats.slow_path(self.transport)
        elif not refuses:
            return None
        reasons = list(self._reasons(found, pipe)) or [
            "no cause is visible from here; the peer may receive messages late, or its host may be busy"
        ]
        text = (
            f"the pipe {self.transport!r} to {pipe.peer} {found}. Likely: {'; '.join(reasons)}."
            ' slow_path = "off" stops this comparison'
        )
        if refuses:
            return SlowPathError(text)
        _log.warning("%s; this is logged once", text)
        return None

    # -- why -------------------------------------------------------------------------------------------

    def _reasons(self, found: SlowRate, pipe: Pipe) -> Iterator[str]:
        """Yield the causes visible from here, the surest first, each with its remedy."""
        if own := _report_of(pipe).reason:
            yield own
        if self.wrapped_by:
            yield f"the config wraps it in {self.wrapped_by!r}; name {self.transport!r} itself"
        yield from self._other_host(found) if self.agreement.cross_host else self._this_host()
        if self.config.tls_cert and not self.config.host.startswith("unix:") and self._is_tcp():
            yield "connections over TCP are encrypted (tls_cert), which costs processor time"
        yield from _processors(self.config.thread_cpus)

    def _is_tcp(self) -> bool:
        return self.agreement.cross_host or Address(self.config.host).is_loopback

    def _this_host(self) -> Iterator[str]:
        known = {**self._theirs(), **self.abilities()}
        faster = [
            (known[each.name].cost.seconds(REFERENCE_NBYTES), each.reason, each.name)
            for each in self.agreement.transports[self.device].candidates[1:]
            if each.name in known and self.device in known[each.name].devices
        ]
        claim = self._claim()
        if faster and claim is not None and min(faster)[0] < claim.seconds(REFERENCE_NBYTES):
            _, reason, name = min(faster)
            yield (
                f"both ends are on one host, and {name!r}, which claims {known[name].cost.gb_per_s:.3g} GB/s,"
                f" was passed over: {reason}"
            )
        with contextlib.suppress(OSError):
            room = os.statvfs(SHARED_MEMORY)
            free = room.f_bavail * room.f_frsize
            if free < _SMALL_SHM:
                yield f"{SHARED_MEMORY} has only {free >> 20} MiB free; enlarge it (docker run --shm-size)"

    def _other_host(self, found: SlowRate) -> Iterator[str]:
        interface = next((name for name, found in interfaces().items() if self.config.host in found), "")
        mbit = _speed_of(interface) if interface else 0
        if mbit and mbit / 8000 < found.expected_gb_per_s:
            yield (
                f"the peer is on another host, and the interface {interface} runs at {mbit} Mbit/s,"
                f" which is {mbit / 8000:.3g} GB/s; set host to the address of a faster one"
            )
        else:
            yield (
                "the peer is on another host, and the network between the two carries less than that; compare"
                " with iperf3, and set host to the address of the fastest interface"
            )


@attrs.frozen(kw_only=True)
class SlowStoreAlarm:
    """Compares one opened store's rates with its earlier ones, and warns of and counts slow ones."""

    config: Config
    stats: TransferStats
    name: str

    def watch(self, store: Store) -> StoreWatch | None:
        """Begin to compare the store's rates. Return ``None`` if the config turns the comparison off."""
        if self.config.slow_path == "off":
            return None
        refuses = self.config.slow_path == "refuse"

        def alarm(op: StoreOp, found: SlowRate) -> None:
            self.stats.slow_store(op, self.name)
            doing, refusing = _STORE_WORDS[op]
            then = f". kvplug {refusing} for {REFUSED_S:.0f} s at a time" if refuses else ""
            _log.warning(
                '%s the store %r %s. Likely: %s%s. slow_path = "off" stops this comparison; this is logged'
                " once",
                doing,
                self.name,
                found,
                "; ".join(self._reasons(op, store)),
                then,
            )

        return StoreWatch(store.medium, alarm, refuses=refuses)

    def _reasons(self, op: StoreOp, store: Store) -> list[str]:
        """Return the causes visible from here, each with its remedy."""
        seen = list(_processors(self.config.thread_cpus))
        if route := store.route:
            seen.append(f"pages take this path, which may be slow: {route}")
        if store.medium == "disk":
            seen.append(
                "the disk has become slower, is almost full, or serves other programs too"
                if op == "put"
                else "pages now come from the disk instead of the page cache, or the disk has become slower"
            )
        elif store.is_shared:
            seen.append("its server, the network to it, or other programs that use it may be busy")
        return seen or ["no cause is visible from here"]


def _report_of(pipe: Pipe) -> Pipe.PathReport:
    """Return the transport's report. An error in it is logged and does not end the pipe."""
    try:
        return pipe.path_report()
    except Exception:
        _log.warning("%r failed to report the rate of its path", pipe, exc_info=True)
        return Pipe.PathReport()


def _speed_of(interface: str) -> int:
    """Return the speed that the kernel reports, in Mbit/s; 0 if it is unknown."""
    try:
        return max(0, int((_NET / interface / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def _processors(thread_cpus: str) -> Iterator[str]:
    """Yield the faults of this host's processors and threads, each with its remedy."""
    try:
        quota, period = _CPU_MAX.read_text().split()
        cpus = int(quota) / int(period)
    except (OSError, ValueError):
        cpus = float("inf")
    if cpus < _FEW_CPUS:
        yield f"this container may use {cpus:.2g} processors; raise its CPU limit"
    if len(os.sched_getaffinity(0)) < _FEW_CPUS <= (os.cpu_count() or 1):
        yield "this process may use one processor only; give it more"
    if thread_cpus.isdecimal():
        yield f"all threads of kvplug share processor {thread_cpus} (thread_cpus); give them more"
    if (load := host_load()) > _FEW_CPUS:
        yield f"this host is busy: {load:.0f} runnable threads for each processor"
    elif (waits := _interpreter_wait()) > sys.getswitchinterval() / 2:
        yield (
            f"another thread of this process keeps Python's interpreter lock, so each step of a transfer"
            f" waits {waits * 1000:.0f} ms for it; move that work into another process"
        )


def _interpreter_wait() -> float:
    """Return the seconds that a thread takes to regain the interpreter lock, as the median of three tries."""
    waits = []
    for _ in range(3):
        began = time.perf_counter()
        time.sleep(0)
        waits.append(time.perf_counter() - began)
    return statistics.median(waits)
