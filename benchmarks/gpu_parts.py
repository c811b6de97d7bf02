"""The parts of ``gpu.py`` that measure transports: which processes each starts, and what rows come of it."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import attrs
import gpu_children
from gpu_children import TWO_HOSTS, paged_bytes

from kvplug import KvplugError
from kvplug_bench.candidate import INTO, LATENCY, PIPE, Candidate, copy_on
from kvplug_bench.rounds import Outcome, Plan, run_rounds
from kvplug_bench.rows import Row as BenchRow, compare
from kvplug_bench.stopwatch import in_burst
from kvplug_testing import peers

HERE = Path(__file__).parent
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALL = 4 * KIB
"""Bytes of the message whose latency is measured."""
NEVER_RUN = "not run: "
_COPY = "copy on the device"


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table."""

    part: str
    what: str
    nbytes: int | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None
    """Of what a copy from device memory to device memory reaches in the same round."""
    us: float | None = None
    said: str = ""
    """Why there is no figure, or what else there is to say."""


@attrs.define(kw_only=True)
class Setting:
    """What this run is about."""

    gpus: int
    """0 over the fakes."""
    quick: bool
    out: Path
    libraries: Mapping[str, str] = attrs.field(factory=dict)
    """The fakes, by plugin; empty on GPUs."""
    tell: Callable[[str], None]
    drawn: list[BenchRow] = attrs.field(factory=list)
    """For the plot."""

    @property
    def device(self) -> str:
        return "cuda:0" if self.gpus else "cpu"

    @property
    def env(self) -> dict[str, str]:
        """For processes with NCCL, whose warnings are kept beside the tables."""
        logs = self.out / "nccl"
        logs.mkdir(exist_ok=True)
        return {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{logs}/%p.log"}

    @property
    def rounds(self) -> int:
        return 1 if self.quick or not self.gpus else 3

    def sizes(self, largest: int = GIB) -> tuple[int, ...]:
        if not self.gpus:
            return (64 * KIB, MIB)
        some = (64 * KIB, MIB, 64 * MIB, GIB)
        every = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
        return tuple(size for size in (some if self.quick else every) if size <= largest)

    def burst_bytes(self, wanted: int) -> int:
        return wanted if self.gpus else MIB


# -- pipes -------------------------------------------------------------------------------------------


def cuda_ipc(setting: Setting, limit_s: float) -> Iterator[Row]:
    """Two processes on one GPU."""
    yield from _pipes("cuda-ipc", setting, [_pipe(setting, "cuda-ipc")], setting.sizes(), limit_s)


def pynccl(setting: Setting, limit_s: float) -> Iterator[Row]:
    """Two processes on one GPU, which NCCL takes for two hosts."""
    slow = _pipe(
        setting,
        "pynccl",
        name="pynccl, one GPU over sockets",
        link="gpu_children:OneGpu",
        env=TWO_HOSTS,
        burst_bytes=256 * MIB,
    )
    yield from _pipes("pynccl", setting, [slow], setting.sizes(64 * MIB), limit_s)


def two_gpus(setting: Setting, limit_s: float) -> Iterator[Row]:
    """Both pipes between two GPUs."""
    if setting.gpus == 1:
        yield Row(part="two-gpus", what="pipes between two GPUs", said=f"{NEVER_RUN}one GPU is here")
        return
    devices = ("cuda:0", "cuda:1") if setting.gpus else ("cpu", "cpu")
    between = [
        _pipe(setting, name, name=f"{name}, two GPUs", devices=devices) for name in ("cuda-ipc", "pynccl")
    ]
    yield from _pipes("two-gpus", setting, between, setting.sizes(), limit_s)


def _pipe(setting: Setting, transport: str, burst_bytes: int = 4 * GIB, **more: Any) -> Candidate:
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    given: dict[str, Any] = {
        "name": transport,
        "kind": PIPE,
        "link": "kvplug_bench.transports:PipeLink",
        "arguments": {"path": None, "overrides": [f"transport={transport}"]},
        "ops": (INTO, LATENCY),
        "devices": (setting.device,),
        **more,
    }
    given["env"] = {**setting.env, **given.get("env", {}), "PYTHONPATH": os.pathsep.join(path)}
    given["burst_bytes"] = setting.burst_bytes(burst_bytes)
    if setting.libraries:
        given["link"] = "gpu_children:OverFake"
        given["arguments"] = {"transport": transport, "library": setting.libraries[transport]}
    return Candidate(**given)


def _pipes(
    part: str, setting: Setting, candidates: Sequence[Candidate], sizes: tuple[int, ...], limit_s: float
) -> Iterator[Row]:
    copy = attrs.evolve(copy_on(setting.device), burst_bytes=setting.burst_bytes(4 * GIB))
    plan = Plan(
        sizes=sizes,
        rounds=setting.rounds,
        idle_s=0,
        latency_bytes=SMALL,
        life_s=min(60.0, limit_s),
        limit_s=limit_s,
    )

    def turn(candidate: Candidate, number: int) -> None:
        setting.tell(f"{part}: round {number + 1}, {candidate.name}")

    outcomes = run_rounds([copy, *candidates], plan, turn)
    for outcome in outcomes:
        _keep_last_output(setting, outcome)
        for each in compare(outcome, outcomes):
            if outcome.candidate is not copy or part == "cuda-ipc":
                setting.drawn.append(each.row)
            if outcome.candidate is copy and not outcome.skipped_because and part != "cuda-ipc":
                continue
            yield Row(
                part=part,
                what=_COPY if outcome.candidate is copy else f"{each.row.name}, {each.row.op or 'pipe'}",
                nbytes=each.row.bytes,
                gb_per_s=each.row.gb_per_s,
                of_copy=each.of_memcpy,
                us=each.row.latency_us_p50,
                said=f"{NEVER_RUN}{each.row.skipped_because}" if each.row.skipped_because else "",
            )


def _keep_last_output(setting: Setting, outcome: Outcome) -> None:
    """All that a process said which failed: the table has its last line only."""
    if outcome.last_output:
        name = f"failed-{_file_name(outcome.candidate.name)}.txt"
        (setting.out / name).write_text(outcome.last_output)


def _file_name(what: str) -> str:
    return re.sub(r"\W+", "-", what)


# -- one process alone, and ranks ----------------------------------------------------------------------


def paged(setting: Setting, limit_s: float) -> Iterator[Row]:
    """Gather and scatter of 16-token blocks."""
    layers, tokens, times = (8, 4096, 10) if setting.gpus else (2, 64, 1)
    with peers.start(gpu_children.paged, setting.device, layers, tokens, times, timeout_s=limit_s) as child:
        found = child.result(limit_s)
    nbytes = paged_bytes(layers, tokens)
    for order in dict.fromkeys(name.partition(", ")[2] for name in found):
        for what in ("gather", "scatter"):
            yield _beside(
                "paged",
                f"{what} of 16-token blocks ({order})",
                nbytes,
                times,
                found[f"{what}, {order}"],
                found[f"copy, {order}"],
            )


def staged(setting: Setting, limit_s: float) -> Iterator[Row]:
    """Pages between the store "host" and a cache on the GPU: read through pinned memory, and written straight
    into the store's memory once it is pinned."""
    device, layers, tokens, times = ("cuda:0", 32, 1024, 5) if setting.gpus else ("simulated", 2, 64, 1)
    with peers.start(gpu_children.staged, device, layers, tokens, times, timeout_s=limit_s) as child:
        found = child.result(limit_s)
    nbytes = paged_bytes(layers, tokens)
    for what, copy, beside in (
        ("get", "copy in", "from pinned memory to the device"),
        ("put", "copy out", "from the device to pinned memory"),
    ):
        name = f"{what}, store host, staged (the copy is one {beside})"
        yield _beside("staged", name, nbytes, times, found[what], found[copy])


def to_itself(setting: Setting, limit_s: float) -> Iterator[Row]:
    """NCCL with one rank that sends to itself."""
    sizes, burst = setting.sizes(), setting.burst_bytes(GIB)
    with peers.start(
        gpu_children.to_itself,
        *(setting.device, sizes, burst, setting.libraries.get("pynccl", "")),
        timeout_s=limit_s,
        env=setting.env | {"NCCL_SOCKET_IFNAME": "=lo"},
    ) as child:
        found = child.result(limit_s)
    for nbytes in sizes:
        seconds = found[f"send {nbytes}"], found[f"copy {nbytes}"]
        yield _beside("to-itself", "NCCL, one rank to itself", nbytes, in_burst(nbytes, burst), *seconds)


def all_reduce(setting: Setting, limit_s: float) -> Iterator[Row]:
    """Two ranks of the communicator "pynccl", on one GPU, and on two."""
    yield from _all_reduce(setting, limit_s / 2, shares=True)
    if setting.gpus > 1:
        yield from _all_reduce(setting, limit_s / 2, shares=False)


def _all_reduce(setting: Setting, limit_s: float, *, shares: bool) -> Iterator[Row]:
    what = "all_reduce, one GPU over sockets" if shares else "all_reduce, two GPUs"
    sizes, times = setting.sizes(16 * MIB if shares else GIB), 8 if setting.gpus else 2
    devices = [setting.device] * 2 if shares else ["cuda:0", "cuda:1"]
    setting.tell(f"all-reduce: {what}")
    given = (sizes, times, setting.libraries.get("pynccl", ""), shares)
    try:
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(len(devices)))
            ranks = [
                stack.enter_context(
                    peers.start(
                        gpu_children.all_reduce,
                        *(rank, device, *given),
                        timeout_s=limit_s,
                        env=setting.env | (TWO_HOSTS if shares else {}),
                    )
                )
                for rank, device in enumerate(devices)
            ]
            ranks[1].send(ranks[0].recv(limit_s))
            ended = [pool.submit(each.result, limit_s) for each in ranks]
            for each in as_completed(ended):
                each.result()  # raises the error of the first that failed
            found = ended[0].result()
    except (KvplugError, OSError) as e:
        yield not_run("all-reduce", what, e, setting)
        return
    for nbytes in sizes:
        seconds = found[f"all_reduce {nbytes}"], found[f"copy {nbytes}"]
        yield _beside("all-reduce", what, nbytes, times, *seconds)


def _beside(
    part: str, what: str, nbytes: int, times: int, ours: Sequence[float], copies: Sequence[float]
) -> Row:
    """Medians of the bursts, and of the ratios of two that came one after the other."""
    took = statistics.median(ours) / times
    return Row(
        part=part,
        what=what,
        nbytes=nbytes,
        gb_per_s=nbytes / took / 1e9,
        of_copy=statistics.median(copy / our for our, copy in zip(ours, copies)),
        us=took * 1e6,
    )


def last_line(text: str) -> str:
    return next((line.strip(" =") for line in reversed(text.splitlines()) if line.strip()), "without a word")


def not_run(part: str, what: str, error: Exception, setting: Setting) -> Row:
    """Why, in a line; all of it beside the results."""
    log = f"failed-{_file_name(what)}.txt"
    (setting.out / log).write_text(f"{type(error).__name__}: {error}\n")
    lines = str(error).splitlines() or [type(error).__name__]
    why = lines[0] if len(lines) == 1 else last_line(str(error))
    return Row(part=part, what=what, said=f"{NEVER_RUN}{why} ({log})")
