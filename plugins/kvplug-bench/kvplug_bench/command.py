"""``kvplug bench``: the speed of transports on this host, compared with other ways to move tensors."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

from kvplug.assembly.registry import Registry
from kvplug.cli.duration import Duration
from kvplug.cli.output import show_table
from kvplug.config.config import DEVICE, Config
from kvplug.config.messages import did_you_mean
from kvplug.config.units import format_bytes, parse_bytes
from kvplug.errors import UnsupportedError
from kvplug.transport import peer_text
from kvplug.transport.queue import MAX_CHUNK_BYTES, MAX_CHUNKS
from kvplug_bench.candidate import BASELINES, Candidate, baseline
from kvplug_bench.choice import transports
from kvplug_bench.content import SMALLEST
from kvplug_bench.device import CPU, kind_of
from kvplug_bench.interrupts import deferred_interrupts
from kvplug_bench.plot import FORMATS, check_plot, circumstances, save_plot
from kvplug_bench.rounds import Outcome, Plan, run_rounds
from kvplug_bench.rows import COLUMNS, Comparison, cells, compare, refused

_FAILED = "failed; the last output of its process:"
_INTERRUPTED = 130
"""The exit code that shells report for a process ended by SIGINT."""


class _Stoppable(click.Command):
    """A command that prints "stopped" when Ctrl-C ends it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(_INTERRUPTED)


def _list(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    """The names in ``A,B``, without duplicates."""
    return tuple(dict.fromkeys(name for each in (text or "").split(",") if (name := each.strip())))


def _baselines(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    names = _list(context, parameter, text)
    for name in names:
        if name not in BASELINES:
            hint = did_you_mean(name, BASELINES) or f"; known are {', '.join(BASELINES)}"
            raise click.BadParameter(f"no baseline is named {name!r}{hint}")
    return names


def _size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def _sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    sizes = {_size(context, parameter, each) or 0 for each in _list(context, parameter, text)}
    wrong = [size for size in sizes if size < SMALLEST or size % 4]
    if wrong or not sizes:
        given = f"; {format_bytes(wrong[0])} was given" if wrong else ""
        raise click.BadParameter(f"sizes must be multiples of 4, and at least {SMALLEST} bytes{given}")
    return tuple(sorted(sizes))


def _devices(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    names = tuple(each.strip() for each in (text or "").split(",") if each.strip())
    wrong = next((name for name in names if not DEVICE.fullmatch(name)), None)
    if wrong is not None or (text and not names):
        raise click.BadParameter(f'{wrong or text!r} is not a device such as "cpu", "cuda" or "cuda:1"')
    if len(names) > 2 or len({kind_of(name) for name in names}) > 1:
        raise click.BadParameter(f"{text!r} is neither one device nor two of the same kind")
    return names


def _picture(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    if path is not None and Path(path).suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{path!r} is not a {' or '.join(FORMATS)} file")
    if path is not None:
        try:
            check_plot(path)
        except OSError as e:
            raise click.BadParameter(f"{path!r} cannot be written: {e.strerror}") from e
    return path


@click.command(cls=_Stoppable)
@click.option(
    "--transport",
    "names",
    metavar="A,B",
    callback=_list,
    help='Pipes and message queues to measure, as NAME or KIND:NAME; by default all that "auto" considers.',
)
@click.option(
    "--baseline",
    "baselines",
    metavar="A,B",
    default=",".join(BASELINES),
    callback=_baselines,
    help='What to compare them with: memcpy, gloo, zmq; by default all of these, "" for none.',
)
@click.option(
    "--sizes",
    metavar="A,B",
    default="64KiB,1MiB,16MiB,64MiB",
    callback=_sizes,
    help="Sizes of the tensors, with units; by default 64KiB,1MiB,16MiB,64MiB.",
)
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(min=1),
    default=5,
    help="How often each transport and each baseline is measured, in turns; by default 5.",
)
@click.option(
    "--readers",
    metavar="N",
    type=click.IntRange(1, 64),
    default=1,
    help="How many readers each queue has; by default 1.",
)
@click.option(
    "--chunk-bytes",
    metavar="SIZE",
    default=format_bytes(MAX_CHUNK_BYTES),
    callback=_size,
    help="The size of a queue's chunks, each of which holds one message; by default 24 MiB.",
)
@click.option(
    "--chunks",
    metavar="N",
    type=click.IntRange(min=1),
    default=MAX_CHUNKS,
    help="How many chunks a queue has; by default 10.",
)
@click.option(
    "--idle",
    "idle_s",
    metavar="DURATION",
    type=Duration(may_be_zero=True),
    default="1 s",
    help="How long a waiting receiver's CPU time is measured, 0 to skip this; by default 1 s.",
)
@click.option(
    "--device",
    "devices",
    metavar="NAME[,NAME]",
    callback=_devices,
    help='The device of the tensors, "cpu" or "cuda", or one each for sender and receiver: "cuda:0,cuda:1";'
    " by default the config's.",
)
@click.option("--config", "path", metavar="FILE", help="A config file with the options of the transports.")
@click.option(
    "--plot", metavar="FILE", callback=_picture, help="Draw GB/s over size into a .png or .svg file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def bench(
    names: tuple[str, ...],
    baselines: tuple[str, ...],
    sizes: tuple[int, ...],
    rounds: int,
    readers: int,
    chunk_bytes: int,
    chunks: int,
    idle_s: float,
    devices: tuple[str, ...],
    path: str | None,
    plot: str | None,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Measure the speed of transports on this host, compared with other ways to move tensors.

    All are measured in turns, each time in fresh processes, and the content of messages is checked. Options
    of a transport are set as in any config: KEY=VALUE (options.cpu.connections=1), environment, file.
    """
    footer = circumstances()  # before the measurement adds to the load
    devices = devices or (Config.load(path, overrides=overrides).device,)
    candidates = transports(
        Registry.from_env(),
        names,
        path=path,
        overrides=overrides,
        max_chunk_bytes=chunk_bytes,
        max_chunks=chunks,
        devices=devices,
    )
    kinds = {each.kind for each in candidates}
    candidates += [each for name in baselines for each in baseline(name, kinds, devices)]
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("kvplug bench moves tensors, and torch is not installed: pip install torch")
    plan = Plan(sizes=sizes, rounds=rounds, readers=readers, idle_s=idle_s)
    with deferred_interrupts(), _progress(len(candidates) * rounds) as turn:
        outcomes = run_rounds(candidates, plan, turn)
    compared = [
        comparison
        for outcome in outcomes
        for comparison in (*compare(outcome, outcomes), *refused(outcome, sizes))
    ]
    if as_json:
        click.echo(json.dumps([attrs.asdict(each.row) for each in compared], indent=2))
    else:
        _show(compared, plan, devices)
    if plot is not None:
        try:
            save_plot([each.row for each in compared], plot, footer=footer)
        except OSError as e:
            raise click.ClickException(f"{plot!r} cannot be written: {e.strerror}") from e
    _report_failures(outcomes)


def _show(compared: Sequence[Comparison], plan: Plan, devices: Sequence[str]) -> None:
    rows = [cells(each, "" if each.row.bytes is None else format_bytes(each.row.bytes)) for each in compared]
    filled = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
    show_table([COLUMNS[i] for i in filled], [[row[i] for i in filled] for row in rows])
    load = os.getloadavg()[0]
    where = "" if devices == (CPU,) else f" On {' and '.join(devices)}."
    click.echo(
        f"\n{plan.rounds} rounds, medians.{where} {os.cpu_count()} processors, load {load:.1f},"
        f" Linux {platform.release()}, Python {platform.python_version()}."
    )


def _report_failures(outcomes: Sequence[Outcome]) -> None:
    """Print the last output of each candidate that failed, and exit with code 1."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    for outcome in failed:
        what = f"{outcome.candidate.kind} {outcome.candidate.name}"
        click.echo(peer_text(f"kvplug: {what} {_FAILED}\n{outcome.last_output}", keep_lines=True), err=True)
    if failed:
        sys.exit(1)


@contextmanager
def _progress(turns: int) -> Iterator[Callable[[Candidate, int], None] | None]:
    """A progress bar if stderr is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=turns)
        done = -1

        def turn(candidate: Candidate, number: int) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=f"round {number + 1}: {candidate.name}")

        yield turn
