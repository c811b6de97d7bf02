"""Install SGLang into the environment of the Python that runs this, to run on a CPU.

Usage: sglang_cpu.py [pip options]. The version is the one in constraints.txt.

SGLang's wheel requires kernels for GPUs, another torch, and torch's packages for audio and images. Text on a
CPU needs none of them. So all other requirements are installed, and the wheel without dependencies. For what
SGLang imports nevertheless there are stubs, and for what HiCache needs a GPU for there are replacements: the
package in sglang_stubs. torch must already be installed.
"""

import re
import sys
from pathlib import Path

from cpu_wheel import install, pip

STUBS = Path(__file__).parent / "sglang_stubs"
LEFT_OUT = re.compile(
    r"(torch|torchvision|torchaudio|torchcodec|torch_memory_saver"  # another build, sound and pictures
    r"|timm|decord2|av|datasets|modelscope|anthropic|kernels|deepseek-recipe|tml-renderers"
    r"|cuda-python|flash-attn-4|flashinfer_python|humming-kernels|nvidia-.*|nvshmem4py-cu13|quack-kernels"
    r"|sgl-.*|sglang-kernel|tilelang|smg-grpc-servicer)(?![\w-])"  # GPUs, and other servers
)
ALSO = ("dill", "triton")
"""SGLang imports triton, which only torch's CUDA build requires, and dill, which the others would bring."""

if __name__ == "__main__":
    install("sglang", LEFT_OUT, sys.argv[1:], also=ALSO)
    pip("install", "--no-deps", "--no-build-isolation", "--force-reinstall", str(STUBS), *sys.argv[1:])
