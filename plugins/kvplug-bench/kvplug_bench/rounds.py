"""Measures every candidate in turn in each round, with fresh processes each time."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import attrs

from kvplug.errors import KvplugError
from kvplug_bench.candidate import ALONE, BULK, COPY, LATENCY, QUEUE, WAKE, Candidate
from kvplug_bench.content import SMALLEST
from kvplug_bench.interrupts import DeferredInterrupts, deferred_interrupts
from kvplug_bench.links import UnavailableError
from kvplug_bench.processes import SETTLE_S, EndError, MeasuringProcess
from kvplug_bench.queues import VALUE
from kvplug_bench.stopwatch import in_burst
from kvplug_bench.worker import FIGURES, RENDEZVOUS, UNAVAILABLE, take_part

LIFE_S = 300.0

_FOLLOWS = {"PeerGoneError", "EOFError", "ConnectionResetError", "BrokenPipeError"}
"""Errors that an end raises because the other end is gone."""


@attrs.frozen(kw_only=True)
class Plan:
    """What to measure for each candidate, and for how long."""

    sizes: tuple[int, ...]
    rounds: int = 5
    readers: int = 1
    """The number of readers of each queue."""
    idle_s: float = 1.0
    """How long a receiver waits before the message; 0 skips this op."""
    latency_bytes: int = SMALLEST
    """The message size of a pipe's latency test."""
    life_s: float = LIFE_S
    """Time limit of a measuring process, besides ``idle_s``; a candidate that exceeds it has failed."""
    limit_s: float = math.inf
    """Limit of all rounds: another round starts only if it is expected to end in time. The first always
    runs.
    """


@attrs.frozen(kw_only=True)
class Figures:
    """The results of one op of one candidate, in one round or as medians over all rounds."""

    op: str
    nbytes: int
    gb_per_s: float | None = None
    latency_us_p50: float | None = None
    latency_us_p99: float | None = None
    cpu_s_per_gb: float | None = None
    idle_cpu_percent: float | None = None
    faults_per_gb: float | None = None


@attrs.define(kw_only=True)
class Outcome:
    """The results of one candidate."""

    candidate: Candidate
    rounds: list[list[Figures]] = attrs.field(factory=list)
    """Empty if it was not measured; else every round has the same ops and sizes."""
    skipped_because: str = ""
    failed: bool = False
    """Whether it was skipped because of a failure; then ``last_output`` describes it."""
    last_output: str = ""


def run_rounds(
    candidates: Sequence[Candidate], plan: Plan, turn: Callable[[Candidate, int], None] | None = None
) -> list[Outcome]:
    """Measure all candidates in turns. Each round begins with another candidate.

    ``turn`` is called before each measurement with its candidate and the number of the round. A candidate
    that cannot work here, or fails, is skipped from then on.
    """
    outcomes = [Outcome(candidate=each, skipped_because=each.skipped_because) for each in candidates]
    began = time.monotonic()
    for number in range(plan.rounds):
        if number and (time.monotonic() - began) * (number + 1) / number > plan.limit_s:
            break
        first = number % max(1, len(outcomes))
        for outcome in outcomes[first:] + outcomes[:first]:
            if outcome.skipped_because:
                continue
            if turn is not None:
                turn(outcome.candidate, number)
            _take_turn(outcome, plan)
    return outcomes


def _take_turn(outcome: Outcome, plan: Plan) -> None:
    try:
        outcome.rounds.append(measure_once(outcome.candidate, plan))
    except UnavailableError as e:
        outcome.skipped_because = str(e)
    except KvplugError as e:
        outcome.failed = True
        outcome.last_output = str(e)
        outcome.skipped_because = f"failed: {_last_line(str(e))}"
    if outcome.skipped_because:
        outcome.rounds.clear()


def measure_once(candidate: Candidate, plan: Plan) -> list[Figures]:
    """One round of one candidate.

    Raises:
        UnavailableError: it cannot work here.
        KvplugError: one of its processes died, raised or did not end; the message contains its last output.
        KeyboardInterrupt: a SIGINT has arrived; raised after the last of its processes is gone.
    """
    size = {COPY: 1, QUEUE: 1 + plan.readers}.get(candidate.kind, 2)
    bulk = [
        (op, nbytes)
        for op in candidate.ops
        for nbytes in plan.sizes
        if op in BULK and not candidate.refuses(op, nbytes)
    ]
    small = [op for op in candidate.ops if op == LATENCY or (op == WAKE and plan.idle_s)]
    task: dict[str, Any] = {
        "kind": candidate.kind,
        "link": candidate.link,
        "arguments": dict(candidate.arguments),
        "size": size,
        "bulk": bulk,
        "small": small,
        "idle_s": plan.idle_s,
        "burst_bytes": candidate.burst_bytes,
        "latency_bytes": plan.latency_bytes,
    }
    target = f"{take_part.__module__}:{take_part.__name__}"
    life_s = plan.life_s + plan.idle_s
    with deferred_interrupts() as interrupts, ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-bench-"))
        pool = stack.enter_context(ThreadPoolExecutor(size, thread_name_prefix="kvplug bench"))
        ends: list[MeasuringProcess] = []
        for rank in range(size):
            its = task | {"rank": rank, "folder": folder, "device": candidate.device(rank)}
            end = MeasuringProcess(
                target,
                its,
                life_s=life_s,
                wait_s=life_s + SETTLE_S,
                env=candidate.env,
                python=candidate.python,
            )
            ends.append(stack.enter_context(end))
            interrupts.check()
        attended = [pool.submit(_attend, each, ends) for each in ends]
        every = _gathered(attended, interrupts)
    return [
        *(
            _bulk(op, nbytes, [each[f"{op} {nbytes}"] for each in every], candidate.burst_bytes)
            for op, nbytes in bulk
        ),
        *(
            _small(op, [each.get(op, {}) for each in every], _small_bytes(op, candidate, plan))
            for op in small
        ),
    ]


def _attend(end: MeasuringProcess, ends: Sequence[MeasuringProcess]) -> dict[str, Any]:
    """Forward one end's messages to the other ends until it reports its figures. Each end has a thread."""
    while True:
        kind, value = end.recv()
        if kind == FIGURES:
            end.wait_until_returned()
            return dict(value)
        if kind == UNAVAILABLE:
            raise UnavailableError(value)
        assert kind == RENDEZVOUS
        for other in ends:
            if other is not end:
                other.send(value)


def _gathered(
    attended: Sequence[Future[dict[str, Any]]], interrupts: DeferredInterrupts
) -> list[dict[str, Any]]:
    """The figures of all ends. Raises the error that caused the others, or KeyboardInterrupt."""
    ended: SimpleQueue[Future[dict[str, Any]]] = SimpleQueue()
    for future in attended:
        future.add_done_callback(ended.put)
    in_turn: list[Future[dict[str, Any]]] = []  # in the order of their ends
    for _ in attended:
        in_turn.append(interrupts.get(ended))
        if in_turn[-1].exception():
            wait(attended, SETTLE_S)
            in_turn += [interrupts.get(ended) for _ in range(ended.qsize())]
            settled = [*in_turn, *(future for future in attended if future.done())]
            raise min((error for future in settled if (error := future.exception())), key=_depth)
    return [future.result() for future in attended]


def _depth(error: BaseException) -> int:
    """The distance of an error from the cause: an end that refuses or dies makes the other ends fail."""
    match error:
        case UnavailableError():
            return 0
        case EndError(kind=kind) if kind in _FOLLOWS:
            return 2
    return 1


def _small_bytes(op: str, candidate: Candidate, plan: Plan) -> int:
    if candidate.kind == QUEUE:
        return len(VALUE)
    return plan.latency_bytes if op == LATENCY else SMALLEST


def _bulk(op: str, nbytes: int, ends: Sequence[dict[str, Any]], burst_bytes: int) -> Figures:
    seconds = ends[0]["seconds"]
    gb = nbytes * (1 if op == ALONE else in_burst(nbytes, burst_bytes)) / 1e9
    return Figures(
        op=op,
        nbytes=nbytes,
        gb_per_s=gb / statistics.median(seconds),
        cpu_s_per_gb=sum(each["cpu_s"] for each in ends) / (gb * len(seconds)),
        faults_per_gb=sum(each["faults"] for each in ends) / (gb * len(seconds)),
    )


def _small(op: str, ends: Sequence[dict[str, Any]], nbytes: int) -> Figures:
    first, readers = ends[0], ends[1:]
    if "seconds" in first:
        seconds = first["seconds"]
    else:  # until the last reader has received it
        last = [max(came) for came in zip(*(each["received"] for each in readers), strict=True)]
        seconds = [came - sent for came, sent in zip(last, first["sent"], strict=True)]
    idle = [each["idle"] * 100 for each in readers if "idle" in each]
    return Figures(
        op=op,
        nbytes=nbytes,
        latency_us_p50=statistics.median(seconds) * 1e6,
        latency_us_p99=sorted(seconds)[int(len(seconds) * 0.99)] * 1e6 if len(seconds) > 1 else None,
        idle_cpu_percent=max(idle) if idle else None,
    )


def _last_line(words: str) -> str:
    return next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "without output")
