"""Warnings about slow pipes and stores: the measured rate, the expected rate, and likely causes."""

from __future__ import annotations

import functools
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
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
from kvplug.net.log import LogEvent
from kvplug.transport.capabilities import Capabilities
from kvplug.transport.pipe import Pipe
from kvplug.transport.store.store import Store

_log = logging.getLogger(__name__)

_MOST_PATHS: Final = 1024
_SMALL_SHM: Final = 64 << 20
_FEW_CPUS: Final = 2.0
_NET: Final = Path("/sys/class/net")
_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")
_STORE_WORDS: Final[Mapping[StoreOp, tuple[str, str]]] = {
    "get": ("loading from", "stops loading from it"),
    "put": ("saving to", "stops saving to it"),
}


_rates: Final[WeakValueDictionary[tuple[str, str, str, Capabilities.Cost | None], Rate]] = (
    WeakValueDictionary()
)
"""The rates of open pipes and of remembered paths, by peer, transport, device and claim."""


@functools.lru_cache(_MOST_PATHS)
def _remember(rate: Rate) -> None:
    """Keep the rate of a path after its pipes close, because programs often reopen pipes to the same peer."""


os.register_at_fork(after_in_child=_rates.clear)
os.register_at_fork(after_in_child=_remember.cache_clear)


@attrs.frozen(kw_only=True)
class SlowPathAlarm:
    """Compares one pipe's rate with the expected one, and logs and counts slow paths."""

    config: Config
    stats: TransferStats
    abilities: Callable[[], Mapping[str, Capabilities]]
    """Returns the capabilities of the transports installed here, by name."""
    agreement: Agreement
    transport: str
    device: str

    def watch(self, pipe: Pipe) -> PathWatch | None:
        """Start comparing the pipe's rate. Return ``None`` if the config turns the comparison off.

        Raises:
            SlowPathError: the rate that the transport measured is too low, and the config refuses slow paths.
        """
        if self.config.slow_path == "off":
            return None
        report = _report_of(pipe)
        claim = self._claim()
        expected = report.expected_gb_per_s
        if expected is not None and claim is not None:
            claim = attrs.evolve(claim, gb_per_s=expected) if expected else None
        remote = self.agreement.remote
        path = (remote.engine_id or str(remote.identity), self.transport, self.device, claim)
        rate = _rates.setdefault(path, Rate(claim, on_known=_remember))
        measured = report.measured_gb_per_s
        if measured is not None and claim is not None and measured * CLAIM_FACTOR < claim.gb_per_s:
            at_once = SlowRate(gb_per_s=measured, expected_gb_per_s=claim.gb_per_s)
            if refusal := self._alarm(at_once, pipe, rate):
                raise refusal
        return PathWatch(rate, lambda found: self._alarm(found, pipe, rate))

    def _claim(self) -> Capabilities.Cost | None:
        """Return the higher of the costs that the two ends claim, as the selection does."""
        ends = (self.abilities(), self._theirs())
        claims = [able[self.transport].cost for able in ends if self.transport in able]
        return max(claims, key=lambda cost: cost.seconds(REFERENCE_NBYTES), default=None)

    def _theirs(self) -> dict[str, Capabilities]:
        return {offer.name: offer.capabilities for offer in self.agreement.remote.transports}

    def _alarm(self, found: SlowRate, pipe: Pipe, rate: Rate) -> SlowPathError | None:
        refuses = self.config.slow_path == "refuse"
        if rate.is_first_alarm():
            self.stats.slow("send", self.transport)
        elif not refuses:
            return None
        text = _warning(
            f"the pipe {self.transport!r} to {pipe.peer} {found}",
            self._causes(found, pipe),
            "the peer may receive messages late, or its host may be busy",
        )
        if refuses:
            return SlowPathError(text)
        LogEvent.SLOW_PIPE.log(
            _log,
            f"{text}; this is logged once",
            peer=pipe.peer,
            engine_id=self.agreement.remote.engine_id,
            transport=self.transport,
            gb_per_s=found.gb_per_s,
            expected_gb_per_s=found.expected_gb_per_s,
        )
        return None

    def _causes(self, found: SlowRate, pipe: Pipe) -> list[str]:
        """Return the causes visible from here, most certain first, with remedies. Some texts are empty."""
        host = self.config.host
        is_tcp = not host.startswith("unix:") and (self.agreement.cross_host or Address(host).is_loopback)
        return [
            _report_of(pipe).reason,
            *(
                [_slow_network(host, found.expected_gb_per_s)]
                if self.agreement.cross_host
                else [self._faster_transport(), _full_shared_memory()]
            ),
            "TCP connections are encrypted (tls_cert), which takes processor time"
            if self.config.tls_cert and is_tcp
            else "",
            *_busy_processors(self.config.thread_cpus),
        ]

    def _faster_transport(self) -> str:
        known, claim = {**self._theirs(), **self.abilities()}, self._claim()
        faster = [
            (known[each.name].cost.seconds(REFERENCE_NBYTES), each.reason, each.name)
            for each in self.agreement.transports[self.device].candidates[1:]
            if each.name in known and self.device in known[each.name].devices
        ]
        if not faster or claim is None or min(faster)[0] >= claim.seconds(REFERENCE_NBYTES):
            return ""
        _, reason, name = min(faster)
        return (
            f"both ends are on one host, and {name!r}, which claims {known[name].cost.gb_per_s:.3g} GB/s,"
            f" was passed over: {reason}"
        )


def watch_store(store: Store, name: str, config: Config, stats: TransferStats) -> StoreWatch | None:
    """Start comparing an open store's rates with its earlier ones. Slow rates are logged and counted.

    Return ``None`` if the config turns the comparison off.
    """
    refuses = config.slow_path == "refuse"

    def alarm(op: StoreOp, found: SlowRate) -> None:
        stats.slow(op, name)
        doing, refusing = _STORE_WORDS[op]
        causes = [
            *_busy_processors(config.thread_cpus),
            store.route and f"pages take this path, which may be slow: {store.route}",
        ]
        if store.medium == "disk":
            causes.append(
                "the disk has become slower, is almost full, or serves other programs too"
                if op == "put"
                else "pages now come from the disk instead of the page cache, or the disk has become slower"
            )
        elif store.is_shared:
            causes.append("its server, the network to it, or other programs that use it may be busy")
        text = _warning(f"{doing} the store {name!r} {found}", causes)
        then = f"; kvplug {refusing}, and tries again every {REFUSED_S:.0f} s" if refuses else ""
        LogEvent.SLOW_STORE.log(
            _log,
            f"{text}{then}; this is logged once",
            store=name,
            op=op,
            gb_per_s=found.gb_per_s,
            expected_gb_per_s=found.expected_gb_per_s,
        )

    return None if config.slow_path == "off" else StoreWatch(store.medium, alarm, refuses=refuses)


def _warning(fact: str, causes: list[str], otherwise: str = "") -> str:
    """Format a warning. ``otherwise``: a possible cause to name if none is visible."""
    likely = "; ".join(filter(None, causes))
    if not likely:
        likely = "no cause is visible from here" + (f"; {otherwise}" if otherwise else "")
    return f'{fact}. Likely: {likely}. slow_path = "off" stops this comparison'


def _report_of(pipe: Pipe) -> Pipe.PathReport:
    """Return the transport's report. If it raises, log the error and return an empty report."""
    try:
        return pipe.path_report()
    except Exception:
        _log.warning("%r failed to report the rate of its path", pipe, exc_info=True)
        return Pipe.PathReport()


# -- causes --------------------------------------------------------------------------------------------


def _full_shared_memory() -> str:
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return ""
    free = room.f_bavail * room.f_frsize
    if free >= _SMALL_SHM:
        return ""
    return f"{SHARED_MEMORY} has only {free >> 20} MiB free; enlarge it (docker run --shm-size)"


def _slow_network(host: str, expected_gb_per_s: float) -> str:
    interface = next((name for name, addresses in interfaces().items() if host in addresses), "")
    try:
        gb_per_s = int((_NET / interface / "speed").read_text()) / 8000 if interface else 0  # from Mbit/s
    except (OSError, ValueError):  # the kernel does not know the speed
        gb_per_s = 0
    if 0 < gb_per_s < expected_gb_per_s:
        return (
            f"the peer is on another host, and the interface {interface} runs at {gb_per_s:.3g} GB/s;"
            " set host to the address of a faster one"
        )
    return (
        "the peer is on another host, and the network to it is slower than expected; measure it with iperf3,"
        " and set host to the address of the fastest interface"
    )


def _busy_processors(thread_cpus: str) -> list[str]:
    """Return possible reasons in this host's processors and threads, each with its remedy."""
    found = []
    try:
        quota, period = map(int, _CPU_MAX.read_text().split())
    except (OSError, ValueError):
        quota, period = 1 << 62, 1  # no limit
    if quota / period < _FEW_CPUS:
        found.append(f"this container may use only {quota / period:.2g} processors; raise its CPU limit")
    if len(os.sched_getaffinity(0)) < _FEW_CPUS <= (os.cpu_count() or 1):
        found.append("this process may use only one processor; give it more")
    if thread_cpus.isdecimal():
        found.append(f"all of kvplug's threads share processor {thread_cpus} (thread_cpus); give them more")
    if (load := host_load()) > _FEW_CPUS:
        found.append(f"this host is busy: {load:.0f} runnable threads for each processor")
    elif (wait_s := _interpreter_wait()) > sys.getswitchinterval() / 2:
        found.append(
            f"another thread of this process holds Python's interpreter lock, so each step of a transfer"
            f" waits {wait_s * 1000:.0f} ms for it; move that work into another process"
        )
    return found


def _interpreter_wait() -> float:
    """Return how many seconds a thread waits to regain the interpreter lock: the median of three tries."""
    waits = []
    for _ in range(3):
        began = time.perf_counter()
        time.sleep(0)
        waits.append(time.perf_counter() - began)
    return statistics.median(waits)
