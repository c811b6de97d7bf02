"""Make an environment for each engine: FOLDER/vllm, FOLDER/sglang and FOLDER/lmcache.

Usage: engines.py FOLDER. Each has the engine's CPU build, kvplug with the engine's adapter, and the sample
store of the docs from its own wheel. One that is complete is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAMPLE = "docs/examples/kvplug-sqlite"
ADAPTERS = {"vllm": ("cpu", "lookup", "vllm"), "sglang": ("sglang",), "lmcache": ("lmcache",)}
INSTALLED_ALSO = ("pytest", "psutil", "valkey")
"""What the tests of the adapters, whose helpers are used, import."""


def made(folder: Path, engine: str, wheel: Path) -> None:
    done = folder / "complete"
    if done.exists():
        return
    print(f"installing {engine}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")

    def run(*arguments: str) -> None:
        subprocess.run([python, *arguments], check=True)

    pip = ("-m", "pip", "install", "--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt"))
    run(*pip, "torch", "hatchling", *INSTALLED_ALSO)
    run(str(ROOT / ".ci" / f"{engine}_cpu.py"))
    run(*pip, str(ROOT))
    plugins = [str(ROOT / "plugins" / f"kvplug-{name}") for name in ("testing", *ADAPTERS[engine])]
    run(*pip, "--no-deps", "--no-build-isolation", *plugins, str(wheel))
    done.touch()


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as built:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", built, str(ROOT / SAMPLE)], check=True)
        (wheel,) = Path(built).glob("kvplug_sqlite-*.whl")
        for engine in ADAPTERS:
            made(folder / engine, engine, wheel)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
