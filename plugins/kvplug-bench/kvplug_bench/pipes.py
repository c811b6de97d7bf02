"""Both ends of what moves tensors between two processes, timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplug_bench.candidate import ALONE, LATENCY, OWNED, WAKE
from kvplug_bench.content import SMALLEST, check, content, stamp
from kvplug_bench.stopwatch import BURSTS, PAUSE_S, Stopwatch, in_burst

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug_bench.links import Link
    from kvplug_bench.place import Place

WARM_TRIPS = 200
TRIPS = 1000


def run_sender(link: Link, task: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """From the call of the first send of a burst until the receiver's answer is here."""
    answer = content(SMALLEST, place.name)
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        source, watch = content(nbytes, place.name), Stopwatch()
        count = 1 if op == ALONE else in_burst(nbytes, task["burst_bytes"])
        for number in range(BURSTS):
            stamp(source, number)
            place.finish()
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
        figures[LATENCY] = _trips(link, task["latency_bytes"], place)
    if WAKE in task["small"]:
        link.receive(answer)
        time.sleep(task["idle_s"])
        figures[WAKE] = {"sent": [time.perf_counter()]}
        link.send(answer)
        link.receive(answer)
    return figures


def run_receiver(link: Link, task: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Answers each burst, then looks at its last message. Its time counts from ready to answered."""
    ping = content(SMALLEST, place.name)
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        expected, watch = content(nbytes, place.name), Stopwatch()
        count, out = 1 if op == ALONE else in_burst(nbytes, task["burst_bytes"]), expected.clone()
        for number in range(BURSTS):
            stamp(expected, number)
            out.zero_()
            place.finish()
            watch.start()
            link.send(ping)
            got = _burst(link, op, out, count)
            place.finish()
            link.send(ping)
            watch.stop()
            check(got, expected)
            del got
        figures[f"{op} {nbytes}"] = watch.plain()
    if LATENCY in task["small"]:
        trip, back = (content(task["latency_bytes"], place.name) for _ in range(2))
        for _ in range(WARM_TRIPS + TRIPS):
            link.receive(back)
            link.send(trip)
    if WAKE in task["small"]:
        link.send(ping)
        cpu, begun = time.process_time(), time.perf_counter()
        link.receive(content(SMALLEST, place.name))
        woken = time.perf_counter()
        figures[WAKE] = {"received": [woken], "idle": (time.process_time() - cpu) / (woken - begun)}
        link.send(ping)
    return figures


def _burst(link: Link, op: str, out: Tensor, count: int) -> Tensor:
    """The last message of so many."""
    got = out
    for _ in range(count):
        if op == OWNED:
            del got
            got = link.receive_new(out)
        else:
            link.receive(out)
    return got


def _trips(link: Link, nbytes: int, place: Place) -> dict[str, Any]:
    """Halves of round trips."""
    ping, answer = content(nbytes, place.name), content(nbytes, place.name)
    place.finish()
    seconds = []
    for _ in range(WARM_TRIPS + TRIPS):
        began = time.perf_counter()
        link.send(ping)
        link.receive(answer)
        seconds.append((time.perf_counter() - began) / 2)
    check(answer, ping)
    return {"seconds": seconds[WARM_TRIPS:]}
