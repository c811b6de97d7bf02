import sys

import sglang_cpu_stubs

__version__ = "0.0"
sglang_cpu_stubs.install()
sglang_cpu_stubs.fill(sys.modules[__name__])
