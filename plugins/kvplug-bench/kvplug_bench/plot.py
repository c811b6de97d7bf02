"""Plots of GB/s over message size, on logarithmic axes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvplug.config.units import format_bytes
from kvplug.errors import UnsupportedError
from kvplug_bench.candidate import BULK, COPY, INTO
from kvplug_bench.rows import Row

FORMATS: Final = (".png", ".svg")
_STYLES: Final = ("-", ":", "-.")
"""Line styles of the ops of one candidate, which share a colour."""


def check_plot(path: str) -> None:
    """Check, before anything is measured, that a plot can be drawn and written to ``path``.

    Raises:
        UnsupportedError: matplotlib is not installed; the message says how to install it.
        OSError: the file cannot be written.
    """
    new = not os.path.lexists(path)
    with open(path, "ab"):
        pass
    if new:
        os.unlink(path)
    if find_spec("matplotlib") is None:
        raise UnsupportedError("a plot needs matplotlib: pip install matplotlib")


def circumstances() -> str:
    """The circumstances of a measurement: host, processor, load, time, versions. Two lines."""
    versions = {"kvplug": "kvplug", "PyTorch": "torch"}
    known = [f"{name} {version(package)}" for name, package in versions.items() if find_spec(package)]
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{platform.node()}: {os.cpu_count()} processors, {_processor()}, load {load} (1, 5, 15 minutes)\n"
        f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}, {', '.join(known)}, Python"
        f" {platform.python_version()}, {platform.system()} {platform.release()}"
    )


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        info = ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def save_plot(rows: Sequence[Row], path: str, *, footer: str = "") -> None:
    """Draw the speeds of pipes and queues side by side, with memcpy as the upper bound.

    ``footer`` is printed below in small letters, such as :func:`circumstances`.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    drawn = [row for row in rows if row.op in BULK and row.gb_per_s is not None]
    kinds = sorted({row.kind for row in drawn if row.kind != COPY}) or [COPY]
    sizes = sorted({row.bytes for row in drawn if row.bytes})
    figure = Figure(figsize=(6.4 * len(kinds), 4.8), layout="constrained")
    for kind, axes in zip(kinds, figure.subplots(1, len(kinds), squeeze=False)[0]):
        for label, points, style in _lines(drawn, kind):
            axes.plot(*zip(*points), label=label, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [format_bytes(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_xlabel("size of a message")
        axes.set_ylabel("GB/s" if kind != "queue" else "GB/s that each reader gets")
        axes.grid(visible=True, alpha=0.3)
        axes.set_title(kind)
        if axes.lines:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the plot, away from the lines
    if footer:
        figure.supxlabel(footer, fontsize=6, parse_math=False)
    figure.savefig(path, dpi=150)


def _lines(rows: Sequence[Row], kind: str) -> Iterator[tuple[str, list[tuple[int, float]], dict[str, str]]]:
    """Label, points and style of each line: memcpy, then each op of each candidate."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row.kind != COPY):
        if row.kind in (kind, COPY) and row.op and row.bytes is not None and row.gb_per_s is not None:
            key = (row.name, "" if (row.kind, row.op) == (COPY, INTO) else row.op)
            points.setdefault(key, []).append((row.bytes, row.gb_per_s))
    names = list(dict.fromkeys(name for name, op in points if op))
    for (name, op), each in points.items():
        if not op:
            yield name, sorted(each), {"color": "black", "linestyle": "--"}
            continue
        ops = [other for owner, other in points if owner == name]
        style = _STYLES[ops.index(op) % len(_STYLES)]
        yield (
            f"{name}, {op}",
            sorted(each),
            {
                "color": f"C{names.index(name)}",
                "linestyle": style,
                "marker": "o",
            },
        )
