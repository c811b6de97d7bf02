"""What `kvplug list` costs over an empty interpreter, and whether it imports torch.

    python benchmarks/startup.py [--rounds N] [--json FILE] [--markdown FILE]

Whole processes, in turns; CPU is the kernel's account of user and system time. "Its libraries" only imports
what `kvplug list` uses of other packages and of the standard library's slow part: the rest is kvplug's own.
Bytecode is cached, as after an installation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

EMPTY, LIBRARIES, LIST = "python -c pass", "its libraries", "kvplug list"
COMMANDS = {
    EMPTY: ["-c", "pass"],
    LIBRARIES: ["-c", "import attrs, click, importlib.metadata, logging, pluggy"],
    LIST: ["-m", "kvplug.cli", "list"],
}
HEAVY = ("torch", "zmq", "numpy")


def run(arguments: list[str]) -> dict[str, float]:
    """Milliseconds of wall and of CPU that one process takes."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, begun = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, env=env)
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_ms": 1e3 * (time.perf_counter() - begun), "cpu_ms": 1e3 * cpu}


def imported() -> list[str]:
    """Which of the heavy libraries `kvplug list` imports."""
    program = (
        "import sys\nfrom kvplug.cli.main import main\n"
        "sys.argv = ['kvplug', 'list']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return [name for name in HEAVY if repr(name) in done.stderr]


def measure(rounds: int) -> dict[str, Any]:
    for arguments in COMMANDS.values():
        run(arguments)  # warm: the files are in memory, the bytecode is written
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            taken[name].append(run(arguments))

    def more(name: str) -> list[float]:
        """Processor time over that of an empty interpreter, in each round."""
        return [
            each["cpu_ms"] - other["cpu_ms"] for each, other in zip(taken[name], taken[EMPTY], strict=True)
        ]

    rows = [
        {
            "command": name,
            "wall_ms": statistics.median(each["wall_ms"] for each in runs),
            "cpu_ms": statistics.median(each["cpu_ms"] for each in runs),
            "more_cpu_ms": statistics.median(more(name)),
            "of_libraries": statistics.median(
                each / other for each, other in zip(more(name), more(LIBRARIES), strict=True)
            ),
        }
        for name, runs in taken.items()
    ]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "python": platform.python_version(),
        "kvplug": metadata.version("kvplug"),
        "distributions": sum(1 for _ in metadata.distributions()),
        "rounds": rounds,
        "heavy_imports": imported(),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| command | wall, ms | CPU, ms | CPU over `python -c pass`, ms | of its libraries' |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {row['command']} | {row['wall_ms']:.0f} | {row['cpu_ms']:.0f} | {row['more_cpu_ms']:.0f}"
        f" | {row['of_libraries']:.2f} |"
        for row in result["rows"]
    ]
    heavy = ", ".join(result["heavy_imports"]) or "none"
    lines += ["", f"{result['rounds']} rounds, medians; {result['distributions']} distributions installed;"]
    lines += [f"of {', '.join(HEAVY)} it imports {heavy}. Python {result['python']}, {result['machine']}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    result = measure(options.rounds)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(table(result) + "\n")


if __name__ == "__main__":
    main()
