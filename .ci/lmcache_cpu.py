"""Install LMCache into the environment of the Python that runs this, without what only GPUs and clouds need.

Usage: lmcache_cpu.py [pip options]. The version is the one in constraints.txt.

The wheel requires CUDA's Python packages, which have gigabytes and do nothing without a GPU, and clients of
services that its own adapters use. LMCache imports them where they are used. So this script reads the
requirements from the wheel, installs all but those, and installs the wheel without dependencies. torch must
already be installed.
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
LEFT_OUT = re.compile(
    r"(torch|cufile-python|cupy-cuda13x|cuda-python|nvtx|awscrt|google-cloud-bigtable|google-api-core"
    r"|setuptools|setuptools_scm|pytest)\b(?!-)"
)


def requirements_of(wheel: Path) -> list[str]:
    """The wheel's requirements, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode())
    asked = headers.get_all("Requires-Dist") or []
    return [each for each in asked if "extra ==" not in each and not LEFT_OUT.match(each)]


def pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet", "--constraint", str(CONSTRAINTS)], check=True
    )


def main(options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, "lmcache", *options)
        (wheel,) = Path(folder).glob("lmcache-*.whl")
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join(requirements_of(wheel)), encoding="utf-8")
        pip("install", "--requirement", str(wanted), *options)
        pip("install", "--no-deps", str(wheel), *options)


if __name__ == "__main__":
    main(sys.argv[1:])
