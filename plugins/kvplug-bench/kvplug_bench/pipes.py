"""Times a pipe: the loops of its sender and of its receiver."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplug_bench.candidate import ALONE, LATENCY, OWNED, WAKE
from kvplug_bench.content import SMALLEST, check, content, stamp
from kvplug_bench.stopwatch import BURSTS, PAUSE_S, Stopwatch, in_burst

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug_bench.device import TimedDevice
    from kvplug_bench.links import Link

WARM_TRIPS = 200
TRIPS = 1000


def run_sender(link: Link, task: Mapping[str, Any], device: TimedDevice) -> dict[str, Any]:
    """Time each burst from the call of its first send to the arrival of the receiver's answer."""
    answer = content(SMALLEST, device.name)
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        source, watch = content(nbytes, device.name), Stopwatch()
        count = 1 if op == ALONE else in_burst(nbytes, task["burst_bytes"])
        for number in range(BURSTS):
            stamp(source, number)
            device.synchronize()
            link.receive(answer)  # the receiver is ready
            if op == ALONE:
                time.sleep(PAUSE_S)
            watch.start()
            for _ in range(count):
                link.send(source)
            link.receive(answer)
            watch.stop()
        figures[f"{op} {nbytes}"] = watch.plain()
    if LATENCY in task["small"]:
        figures[LATENCY] = _trips(link, task["latency_bytes"], device)
    if WAKE in task["small"]:
        link.receive(answer)
        time.sleep(task["idle_s"])
        figures[WAKE] = {"sent": [time.perf_counter()]}
        link.send(answer)
        link.receive(answer)
    return figures


def run_receiver(link: Link, task: Mapping[str, Any], device: TimedDevice) -> dict[str, Any]:
    """Answer each burst, then check its last message. Times each burst from ready to answered."""
    ping = content(SMALLEST, device.name)
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        expected, watch = content(nbytes, device.name), Stopwatch()
        count, out = 1 if op == ALONE else in_burst(nbytes, task["burst_bytes"]), expected.clone()
        for number in range(BURSTS):
            stamp(expected, number)
            out.zero_()
            device.synchronize()
            watch.start()
            link.send(ping)
            got = _burst(link, op, out, count)
            device.synchronize()
            link.send(ping)
            watch.stop()
            check(got, expected)
            del got
        figures[f"{op} {nbytes}"] = watch.plain()
    if LATENCY in task["small"]:
        trip, back = (content(task["latency_bytes"], device.name) for _ in range(2))
        for _ in range(WARM_TRIPS + TRIPS):
            link.receive(back)
            link.send(trip)
    if WAKE in task["small"]:
        link.send(ping)
        cpu, begun = time.process_time(), time.perf_counter()
        link.receive(content(SMALLEST, device.name))
        woken = time.perf_counter()
        figures[WAKE] = {"received": [woken], "idle": (time.process_time() - cpu) / (woken - begun)}
        link.send(ping)
    return figures


def _burst(link: Link, op: str, out: Tensor, count: int) -> Tensor:
    """Receive ``count`` messages; returns the last one."""
    got = out
    for _ in range(count):
        if op == OWNED:
            del got
            got = link.receive_new(out)
        else:
            link.receive(out)
    return got


def _trips(link: Link, nbytes: int, device: TimedDevice) -> dict[str, Any]:
    """Half the round-trip times, in seconds, of many messages."""
    ping, answer = content(nbytes, device.name), content(nbytes, device.name)
    device.synchronize()
    seconds = []
    for _ in range(WARM_TRIPS + TRIPS):
        began = time.perf_counter()
        link.send(ping)
        link.receive(answer)
        seconds.append((time.perf_counter() - began) / 2)
    check(answer, ping)
    return {"seconds": seconds[WARM_TRIPS:]}
