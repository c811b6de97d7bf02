"""What runs in a measuring process: one end of one candidate, or a copy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvplug.errors import KvplugError
from kvplug.transport.spec import load_target
from kvplug_bench.candidate import ALONE, COPY, PIPE
from kvplug_bench.content import check, content, stamp
from kvplug_bench.links import MEETING_S, Meeting, UnavailableError
from kvplug_bench.pipes import run_receiver, run_sender
from kvplug_bench.place import Place, place
from kvplug_bench.queues import Answers, run_reader, run_writer
from kvplug_bench.stopwatch import BURSTS, PAUSE_S, Stopwatch, in_burst
from kvplug_testing.peers import Parent

TOLD, UNAVAILABLE, FIGURES = "told", "unavailable", "figures"
"""What a measuring process says, with a value each."""


def take_part(parent: Parent, task: dict[str, Any]) -> None:
    """Make this process's end, meet the others, and measure what the task says."""
    import warnings

    import torch

    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nothing writes there
    # OpenMP's idle workers spin for a while, and would take the cores from whom we measure.
    torch.set_num_threads(1)
    try:
        where = place(task["device"])
    except UnavailableError as e:
        parent.send([UNAVAILABLE, str(e)])
        return
    figures = _copy(task, where) if task["kind"] == COPY else _measure(parent, task, where)
    if figures is not None:
        parent.send([FIGURES, figures])


def _measure(parent: Parent, task: dict[str, Any], where: Place) -> dict[str, Any] | None:
    meeting = Meeting(
        rank=task["rank"],
        size=task["size"],
        folder=task["folder"],
        tell=lambda value: parent.send([TOLD, value]),
        told=lambda: parent.recv(MEETING_S),
        device=where.name,
    )
    try:
        link = load_target(task["link"])(meeting, **task["arguments"])
    except (UnavailableError, ImportError, KvplugError) as e:
        parent.send([UNAVAILABLE, _reason(e)])
        return None
    if task["kind"] == PIPE:
        figures = (run_sender if meeting.is_first else run_receiver)(link, task, where)
    else:
        answers = Answers(meeting)
        figures = (run_writer if meeting.is_first else run_reader)(link, answers, task)
        answers.close()
    link.close()
    return figures


def _reason(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return str(error) if isinstance(error, UnavailableError) else f"{type(error).__name__}: {error}"


def _copy(task: Mapping[str, Any], where: Place) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        source, watch = content(nbytes, where.name), Stopwatch()
        out = source.clone()
        for number in range(BURSTS):
            stamp(source, number)
            where.finish()
            if op == ALONE:
                time.sleep(PAUSE_S)
            watch.start()
            for _ in range(1 if op == ALONE else in_burst(nbytes, task["burst_bytes"])):
                out.copy_(source)
            where.finish()
            watch.stop()
            check(out, source)
        figures[f"{op} {nbytes}"] = watch.plain()
    return figures
