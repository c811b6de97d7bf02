"""Run a command as on a fresh machine: optional servers and libraries of this host are hidden from it.

    python .ci/fresh_machine.py make test

They are hidden in a mount namespace, which needs Linux, root and `unshare`. Without these the command runs
nevertheless, and the first line of output lists what it can find.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "prerequisites"))

from prerequisites import LIBRARIES, SERVERS


def found_here() -> list[str]:
    """Paths of the servers on PATH, and of the libraries that the loader finds."""
    programs = [program for server in SERVERS for program in server.programs]
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    paths = [
        path for folder in folders for program in programs if os.path.isfile(path := f"{folder}/{program}")
    ]
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    paths += [path for name, path in re.findall(r"^\t(\S+) .* => (\S+)$", cache, re.M) if name in LIBRARIES]
    # Once each: /bin may be /usr/bin. What has no bytes is hidden already.
    return [path for path in dict.fromkeys(map(os.path.realpath, paths)) if os.path.getsize(path)]


def hide(paths: list[str]) -> None:
    """Cover each path by an empty file that cannot be executed or loaded."""
    with tempfile.NamedTemporaryFile(prefix="hidden-") as empty:
        for path in paths:
            subprocess.run(["mount", "--bind", empty.name, path], check=True)


def main(arguments: list[str]) -> None:
    own = ["unshare", "--mount", "--propagation", "private"]
    if arguments[0] == "--in-namespace":
        arguments = arguments[1:]
        hide(found_here())
    elif (paths := found_here()) and subprocess.run(
        [*own, "true"], stderr=subprocess.DEVNULL
    ).returncode == 0:
        print(f"Hidden from {arguments[0]}: {', '.join(paths)}", flush=True)
        arguments = [*own, sys.executable, __file__, "--in-namespace", *arguments]
    elif paths:
        print(f"Cannot be hidden without root: {', '.join(paths)}", flush=True)
    os.execvp(arguments[0], arguments)  # noqa: S606 (a command line, not a shell's)


if __name__ == "__main__":
    main(sys.argv[1:])
