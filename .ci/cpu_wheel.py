"""Install a wheel and its requirements, without those that a CPU does not need.

`vllm_cpu.py`, `sglang_cpu.py` and `lmcache_cpu.py` use it. torch must already be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def requirements_of(wheel: Path, left_out: re.Pattern[str]) -> list[str]:
    """The wheel's requirements, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode())
    asked = headers.get_all("Requires-Dist") or []
    return [each for each in asked if "extra ==" not in each and not left_out.match(each)]


def pip(*arguments: str, constraints: Path = CONSTRAINTS) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--constraint", str(constraints)]
    subprocess.run(command, check=True)


def install(
    name: str,
    left_out: re.Pattern[str],
    options: list[str],
    *,
    also: tuple[str, ...] = (),
    constraints: Path = CONSTRAINTS,
    target: str | None = None,
) -> None:
    """Install the requirements that ``left_out`` does not match, and ``also``; then the wheel alone.

    With a target only the wheel is installed, into that folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, name, *options, constraints=constraints)
        (wheel,) = Path(folder).glob("*.whl")
        if target is not None:
            pip("install", "--no-deps", "--target", target, str(wheel), *options, constraints=constraints)
            return
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join([*requirements_of(wheel, left_out), *also]), encoding="utf-8")
        pip("install", "--requirement", str(wanted), *options, constraints=constraints)
        pip("install", "--no-deps", str(wheel), *options, constraints=constraints)
