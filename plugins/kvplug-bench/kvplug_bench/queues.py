"""The writer and the readers of what moves tensors from one process to many, timed."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplug_bench.candidate import KEPT, LATENCY, WAKE
from kvplug_bench.content import check, content, stamp
from kvplug_bench.links import MEETING_S, Lending, UnavailableError
from kvplug_bench.stopwatch import BURSTS, Stopwatch, in_burst

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug_bench.links import Broadcast, Meeting

VALUE = bytes(range(256)) * 16
"""A small value: 4 KiB, about what a scheduler tells its workers in a step."""
WARM_VALUES = 200
VALUES = 1000


class Answers:
    """From the readers back to the writer: a byte of each over a Unix socket, whatever is measured."""

    def __init__(self, meeting: Meeting) -> None:
        path = f"{meeting.folder}/answers"
        self._sockets = []
        if meeting.is_first:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(meeting.size)
                listener.settimeout(MEETING_S)
                meeting.tell(None)
                self._sockets = [listener.accept()[0] for _ in range(meeting.size - 1)]
        else:
            meeting.told()
            self._sockets = [socket.socket(socket.AF_UNIX)]
            self._sockets[0].connect(path)
        for each in self._sockets:
            each.settimeout(None)

    def give(self) -> None:
        self._sockets[0].send(b"+")

    def take(self) -> None:
        """Every reader's. Raises EOFError: one is gone."""
        for each in self._sockets:
            if not each.recv(1):
                raise EOFError("a reader is gone")

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def run_writer(link: Broadcast, answers: Answers, task: Mapping[str, Any]) -> dict[str, Any]:
    """From the call of the first send of a burst until every reader has answered."""
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        source, watch, count = content(nbytes), Stopwatch(), in_burst(nbytes, task["burst_bytes"])
        send = link.send if op == KEPT else _lending(link).lend
        for number in range(BURSTS):
            stamp(source, number)
            answers.take()  # the readers are ready
            watch.start()
            for _ in range(count):
                send(source)
            answers.take()
            watch.stop()
        figures[f"{op} {nbytes}"] = watch.plain()
    if LATENCY in task["small"]:
        figures[LATENCY] = {"sent": _values(link, answers, WARM_VALUES + VALUES)[WARM_VALUES:]}
    if WAKE in task["small"]:
        figures[WAKE] = {"sent": _values(link, answers, 1, pause_s=task["idle_s"])}
        answers.take()
    return figures


def run_reader(link: Broadcast, answers: Answers, task: Mapping[str, Any]) -> dict[str, Any]:
    """Answers each burst when its last message is there, then looks at that."""
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        expected, watch = content(nbytes), Stopwatch()
        burst, count = _keep if op == KEPT else _look, in_burst(nbytes, task["burst_bytes"])
        for number in range(BURSTS):
            stamp(expected, number)
            burst(link, answers, watch, expected, count)
        figures[f"{op} {nbytes}"] = watch.plain()
    if LATENCY in task["small"]:
        came = []
        for _ in range(WARM_VALUES + VALUES):
            answers.give()
            link.receive_value(len(VALUE))
            came.append(time.perf_counter())
        figures[LATENCY] = {"received": came[WARM_VALUES:]}
    if WAKE in task["small"]:
        answers.give()
        cpu, begun = time.process_time(), time.perf_counter()
        link.receive_value(len(VALUE))
        woken = time.perf_counter()
        figures[WAKE] = {"received": [woken], "idle": (time.process_time() - cpu) / (woken - begun)}
        answers.give()
    return figures


def _values(link: Broadcast, answers: Answers, count: int, pause_s: float = 0.0) -> list[float]:
    """When each was sent. The clock is that of the host, so that readers can say when it came."""
    sent = []
    for _ in range(count):
        answers.take()
        if pause_s:
            time.sleep(pause_s)
        sent.append(time.perf_counter())
        link.send_value(VALUE)
    return sent


def _keep(link: Broadcast, answers: Answers, watch: Stopwatch, expected: Tensor, count: int) -> None:
    watch.start()
    answers.give()
    got = None
    for _ in range(count):
        got = None  # dropped before the next is received
        got = link.receive(expected)
    answers.give()
    watch.stop()
    check(got, expected)


def _look(link: Broadcast, answers: Answers, watch: Stopwatch, expected: Tensor, count: int) -> None:
    lending = _lending(link)
    watch.start()
    answers.give()
    for _ in range(count - 1):
        with lending.look(expected):
            pass
    with contextlib.ExitStack() as looking:
        got = looking.enter_context(lending.look(expected))
        answers.give()
        watch.stop()
        check(got, expected)
        del got


def _lending(link: Broadcast) -> Lending:
    if not isinstance(link, Lending):
        raise UnavailableError("its readers cannot look at its memory")
    return link
