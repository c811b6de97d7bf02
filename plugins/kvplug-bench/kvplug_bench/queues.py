"""Times a queue: the loops of its writer and of its readers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplug_bench.candidate import KEPT, LATENCY, WAKE
from kvplug_bench.content import check, content, stamp
from kvplug_bench.links import RENDEZVOUS_TIMEOUT_S, InPlaceBroadcast, UnavailableError
from kvplug_bench.stopwatch import BURSTS, Stopwatch, in_burst

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug_bench.links import Broadcast, Rendezvous

VALUE = bytes(range(256)) * 16
"""A small value: 4 KiB, about the size of a scheduler's message to its workers in a step."""
WARM_VALUES = 200
VALUES = 1000


class Acknowledgements:
    """One byte from each reader to the writer over a Unix socket, independent of the measured queue."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        path = f"{rendezvous.folder}/acks"
        self._sockets = []
        if rendezvous.is_first:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(rendezvous.size)
                listener.settimeout(RENDEZVOUS_TIMEOUT_S)
                rendezvous.send(None)
                self._sockets = [listener.accept()[0] for _ in range(rendezvous.size - 1)]
        else:
            rendezvous.recv()
            self._sockets = [socket.socket(socket.AF_UNIX)]
            self._sockets[0].connect(path)
        for each in self._sockets:
            each.settimeout(None)

    def send(self) -> None:
        self._sockets[0].send(b"+")

    def wait_for_all(self) -> None:
        """Wait for one byte from every reader. Raises EOFError: a reader is gone."""
        for each in self._sockets:
            if not each.recv(1):
                raise EOFError("a reader is gone")

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def run_writer(link: Broadcast, acks: Acknowledgements, task: Mapping[str, Any]) -> dict[str, Any]:
    """Time each burst from the call of its first send until every reader has answered."""
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        source, watch, count = content(nbytes), Stopwatch(), in_burst(nbytes, task["burst_bytes"])
        send = link.send if op == KEPT else _in_place(link).send_in_place
        for number in range(BURSTS):
            stamp(source, number)
            acks.wait_for_all()  # the readers are ready
            watch.start()
            for _ in range(count):
                send(source)
            acks.wait_for_all()
            watch.stop()
        figures[f"{op} {nbytes}"] = watch.plain()
    if LATENCY in task["small"]:
        figures[LATENCY] = {"sent": _values(link, acks, WARM_VALUES + VALUES)[WARM_VALUES:]}
    if WAKE in task["small"]:
        figures[WAKE] = {"sent": _values(link, acks, 1, pause_s=task["idle_s"])}
        acks.wait_for_all()
    return figures


def run_reader(link: Broadcast, acks: Acknowledgements, task: Mapping[str, Any]) -> dict[str, Any]:
    """Answer each burst when its last message has arrived, then check that message."""
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        expected, watch = content(nbytes), Stopwatch()
        burst, count = _keep if op == KEPT else _look, in_burst(nbytes, task["burst_bytes"])
        for number in range(BURSTS):
            stamp(expected, number)
            burst(link, acks, watch, expected, count)
        figures[f"{op} {nbytes}"] = watch.plain()
    if LATENCY in task["small"]:
        came = []
        for _ in range(WARM_VALUES + VALUES):
            acks.send()
            link.receive_value(len(VALUE))
            came.append(time.perf_counter())
        figures[LATENCY] = {"received": came[WARM_VALUES:]}
    if WAKE in task["small"]:
        acks.send()
        cpu, begun = time.process_time(), time.perf_counter()
        link.receive_value(len(VALUE))
        woken = time.perf_counter()
        figures[WAKE] = {"received": [woken], "idle": (time.process_time() - cpu) / (woken - begun)}
        acks.send()
    return figures


def _values(link: Broadcast, acks: Acknowledgements, count: int, pause_s: float = 0.0) -> list[float]:
    """Send values. Returns the time of each on the host's clock, which the readers share."""
    sent = []
    for _ in range(count):
        acks.wait_for_all()
        if pause_s:
            time.sleep(pause_s)
        sent.append(time.perf_counter())
        link.send_value(VALUE)
    return sent


def _keep(link: Broadcast, acks: Acknowledgements, watch: Stopwatch, expected: Tensor, count: int) -> None:
    watch.start()
    acks.send()
    got = None
    for _ in range(count):
        got = None  # dropped before the next one is received
        got = link.receive(expected)
    acks.send()
    watch.stop()
    check(got, expected)


def _look(link: Broadcast, acks: Acknowledgements, watch: Stopwatch, expected: Tensor, count: int) -> None:
    in_place = _in_place(link)
    watch.start()
    acks.send()
    for _ in range(count - 1):
        with in_place.view_in_place(expected):
            pass
    with contextlib.ExitStack() as looking:
        got = looking.enter_context(in_place.view_in_place(expected))
        acks.send()
        watch.stop()
        check(got, expected)
        del got


def _in_place(link: Broadcast) -> InPlaceBroadcast:
    if not isinstance(link, InPlaceBroadcast):
        raise UnavailableError("its readers cannot read its memory in place")
    return link
