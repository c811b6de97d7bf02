"""Plots of GB/s over message size, on logarithmic axes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Final

from kvplug.config.units import format_bytes
from kvplug.errors import UnsupportedError
from kvplug_bench.candidate import BULK, COPY, INTO
from kvplug_bench.rows import Row

FORMATS: Final = (".png", ".svg")
MANY: Final = 6
"""With more lines than this, the legend is beside the plot."""
_STYLES: Final = ("-", ":", "-.")
"""Line styles of the ops of one candidate, which share a colour."""


def check_plot() -> None:
    """Check before anything is measured that a plot can be drawn.

    Raises:
        UnsupportedError: matplotlib is not installed; the message says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("a plot needs matplotlib: pip install matplotlib")


def save_plot(rows: Sequence[Row], path: str) -> None:
    """Draw the speeds of pipes and queues side by side, with memcpy as the upper bound.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    check_plot()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, StrMethodFormatter

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
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_xlabel("size of a message")
        axes.set_ylabel("GB/s" if kind != "queue" else "GB/s that each reader gets")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.set_title(kind)
        if axes.lines:
            beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(axes.lines) > MANY else {}
            axes.legend(**beside)
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
