"""What `kvplug list` costs over an empty interpreter, and whether it imports torch.

    python benchmarks/startup.py [--rounds N] [--json FILE] [--markdown FILE]

Whole processes, in turns; CPU is the kernel's account of user and system time. "Its libraries" only imports
what `kvplug list` uses of other packages and of the standard library's slow part: the rest is kvplug's own.
Bytecode is cached, as after an installation.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from importlib import metadata
from resource import RUSAGE_CHILDREN, getrusage

import harness

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
    before = getrusage(RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    took, _ = harness.seconds(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=env))
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_ms": 1e3 * took, "cpu_ms": 1e3 * cpu}


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


def main() -> None:
    given = harness.parser(__doc__, 15).parse_args()
    for arguments in COMMANDS.values():
        run(arguments)  # warm: the files are in memory, the bytecode is written
    found = harness.rounds(COMMANDS, given.rounds, lambda name: run(COMMANDS[name]))

    def more(name: str) -> list[float]:
        """Processor time over that of an empty interpreter, in each round."""
        return [a - b for a, b in zip(found[name]["cpu_ms"], found[EMPTY]["cpu_ms"], strict=True)]

    rows = [
        [
            name,
            *(f"{statistics.median(of):.0f}" for of in (*each.values(), more(name))),
            f"{harness.ratio(more(name), more(LIBRARIES)):.2f}",
        ]
        for name, each in found.items()
    ]
    head = ["command", "wall, ms", "CPU, ms", "CPU over `python -c pass`, ms", "of its libraries'"]
    installed, heavy = sum(1 for _ in metadata.distributions()), ", ".join(imported()) or "none"
    about = f"{given.rounds} rounds, medians; {installed} distributions installed; of {', '.join(HEAVY)} it"
    harness.write(given, harness.table(head, rows), f"{about} imports {heavy}. {harness.machine()}.")


if __name__ == "__main__":
    main()
