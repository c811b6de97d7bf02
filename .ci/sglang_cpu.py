"""Install SGLang into the environment of the Python that runs this, to run on a CPU.

Usage: sglang_cpu.py [pip options]. The version is the one in constraints.txt.

SGLang's wheel requires kernels for GPUs, another torch, and torch's packages for audio and images. Text on a
CPU needs none of them. So this script reads the requirements from the wheel, installs all but those, and
installs the wheel without dependencies. For what SGLang imports nevertheless there are stubs, and for what
HiCache needs a GPU for there are replacements: the package in sglang_stubs. torch must already be installed.
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
STUBS = Path(__file__).parent / "sglang_stubs"
LEFT_OUT = re.compile(
    r"(torch|torchvision|torchaudio|torchcodec|torch_memory_saver"  # another build, sound and pictures
    r"|timm|decord2|av|datasets|modelscope|anthropic|kernels|deepseek-recipe|tml-renderers"
    r"|cuda-python|flash-attn-4|flashinfer_python|humming-kernels|nvidia-.*|nvshmem4py-cu13|quack-kernels"
    r"|sgl-.*|sglang-kernel|tilelang|smg-grpc-servicer)(?![\w-])"  # GPUs, and other servers
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
        pip("download", "--no-deps", "--dest", folder, "sglang", *options)
        (wheel,) = Path(folder).glob("sglang-*.whl")
        wanted = Path(folder) / "requirements.txt"
        # It imports triton, which only torch's CUDA build requires, and dill, which others would bring.
        wanted.write_text("\n".join([*requirements_of(wheel), "dill", "triton"]), encoding="utf-8")
        pip("install", "--requirement", str(wanted), *options)
        pip("install", "--no-deps", str(wheel), *options)
    pip("install", "--no-deps", "--no-build-isolation", "--force-reinstall", str(STUBS), *options)


if __name__ == "__main__":
    main(sys.argv[1:])
