"""The main function of a measuring process: one end of one candidate, or a copy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvplug.errors import KvplugError
from kvplug.transport.spec import load_target
from kvplug_bench.candidate import ALONE, COPY, PIPE
from kvplug_bench.content import check, content, stamp
from kvplug_bench.device import TimedDevice, open_device
from kvplug_bench.links import RENDEZVOUS_TIMEOUT_S, Rendezvous, UnavailableError
from kvplug_bench.pipes import run_receiver, run_sender
from kvplug_bench.processes import Parent
from kvplug_bench.queues import Acknowledgements, run_reader, run_writer
from kvplug_bench.stopwatch import BURSTS, PAUSE_S, Stopwatch, in_burst

RENDEZVOUS, UNAVAILABLE, FIGURES = "rendezvous", "unavailable", "figures"
"""The kinds of messages from a measuring process to its parent. Each carries a value."""


def take_part(parent: Parent, task: dict[str, Any]) -> None:
    """Construct this process's end, connect it with the others, and run the task's measurements."""
    import warnings

    import torch

    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nothing writes there
    # OpenMP's idle workers spin for some time, and would take CPU cores from the measured threads.
    torch.set_num_threads(1)
    try:
        device = open_device(task["device"])
    except UnavailableError as e:
        parent.send([UNAVAILABLE, str(e)])
        return
    figures = _copy(task, device) if task["kind"] == COPY else _measure(parent, task, device)
    if figures is not None:
        parent.send([FIGURES, figures])


def _measure(parent: Parent, task: dict[str, Any], device: TimedDevice) -> dict[str, Any] | None:
    rendezvous = Rendezvous(
        rank=task["rank"],
        size=task["size"],
        folder=task["folder"],
        send=lambda value: parent.send([RENDEZVOUS, value]),
        recv=lambda: parent.recv(RENDEZVOUS_TIMEOUT_S),
        device=device.name,
    )
    try:
        link = load_target(task["link"])(rendezvous, **task["arguments"])
    except (UnavailableError, ImportError, KvplugError) as e:
        parent.send([UNAVAILABLE, _reason(e)])
        return None
    if task["kind"] == PIPE:
        figures = (run_sender if rendezvous.is_first else run_receiver)(link, task, device)
    else:
        acks = Acknowledgements(rendezvous)
        figures = (run_writer if rendezvous.is_first else run_reader)(link, acks, task)
        acks.close()
    link.close()
    return figures


def _reason(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return str(error) if isinstance(error, UnavailableError) else f"{type(error).__name__}: {error}"


def _copy(task: Mapping[str, Any], device: TimedDevice) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for op, nbytes in task["bulk"]:
        source, watch = content(nbytes, device.name), Stopwatch()
        out = source.clone()
        for number in range(BURSTS):
            stamp(source, number)
            device.synchronize()
            if op == ALONE:
                time.sleep(PAUSE_S)
            watch.start()
            for _ in range(1 if op == ALONE else in_burst(nbytes, task["burst_bytes"])):
                out.copy_(source)
            device.synchronize()
            watch.stop()
            check(out, source)
        figures[f"{op} {nbytes}"] = watch.plain()
    return figures
