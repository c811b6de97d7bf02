"""Install LMCache into the environment of the Python that runs this, without what only GPUs and clouds need.

Usage: lmcache_cpu.py [pip options]. The version is the one in constraints.txt.

The wheel requires CUDA's Python packages, which have gigabytes and do nothing without a GPU, and clients of
services that its own adapters use. LMCache imports them where they are used. So all other requirements are
installed, and the wheel without dependencies. torch must already be installed.
"""

import re
import sys

from cpu_wheel import install

LEFT_OUT = re.compile(
    r"(torch|cufile-python|cupy-cuda13x|cuda-python|nvtx|awscrt|google-cloud-bigtable|google-api-core"
    r"|setuptools|setuptools_scm|pytest)\b(?!-)"
)

if __name__ == "__main__":
    install("lmcache", LEFT_OUT, sys.argv[1:])
