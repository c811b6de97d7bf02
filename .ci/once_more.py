"""After the matrix has failed: run the failed tests once more, in the environments in which they failed.

    python .ci/once_more.py .tox/results.json

If anything other than a test failed, or pytest itself ended early, nothing runs, and the exit code is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def main(results: Path) -> int:
    environments = json.loads(results.read_text())["testenvs"]  # also those that build packages
    outcomes = {name: run["result"] for name, run in environments.items() if "result" in run}
    failed = [name for name, outcome in outcomes.items() if not outcome["success"]]
    tests = results.parent / "failed-tests"
    hopeless = [name for name in failed if outcomes[name]["exit_code"] != 1 or not (tests / name).exists()]
    if hopeless or not failed:
        print(f"Not because of a test: {', '.join(hopeless) or 'tox itself'} failed.")
        return 1
    print(f"Once more, only what has failed: {', '.join(failed)}.")
    tox = Path(sys.executable).with_name("tox")
    return subprocess.run(
        [tox, "run", "-e", ",".join(failed)], env={**os.environ, "TESTS_AGAIN": "--last-failed"}
    ).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
