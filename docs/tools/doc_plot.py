"""Draw the first table of the page on performance.

Usage: python docs/tools/doc_plot.py. It writes docs/images/choices.svg, and needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1]
PAGE: Final = DOCS / "explanation" / "performance.md"
PLOT: Final = DOCS / "images" / "choices.svg"
_RATIO: Final = "of the peer"


def choices(page: str) -> list[tuple[str, float]]:
    """The rows of the first table: what was chosen and measured, and its share of the peer."""
    table = page[page.index("\n|") + 1 :].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
    at = head.index(_RATIO)
    return [(f"{row[0]}\n{row[1]}".replace("`", ""), float(row[at])) for row in rows]


def draw(rows: list[tuple[str, float]], path: Path) -> None:
    """Draw a bar for each row, and a line at 1."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "kvplug"  # the same table gives the same file
    figure = Figure(figsize=(8, 0.55 * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([name for name, _ in rows], [share for _, share in rows], color="C0", height=0.6)
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(0, 1.1 * max(share for _, share in rows))
    axes.set_xlabel("speed, of the peer's")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(choices(PAGE.read_text(encoding="utf-8")), PLOT)
