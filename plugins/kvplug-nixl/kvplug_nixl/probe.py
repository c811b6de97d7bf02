"""Whether NIXL is installed. It is not imported: an import would load its libraries into the process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

from kvplug.transport import PeerIdentity, Probe

MODULE: Final = "nixl_cu12"
"""NIXL's Python API, from the package ``nixl-cu12``. The package ``nixl`` requires it for CUDA 12 and 13."""
INSTALL: Final = "pip install --no-deps 'nixl-cu12>=1.5,<1.6'"
NEEDS: Final = "numpy"
"""What the module imports."""


def probe(*backends: str) -> Probe:
    """Not viable if NIXL is missing, or all of these backends.

    Args:
        backends: names of NIXL's plugins. The transport needs one of them. Default: those of the store.
    """
    if not sys.platform.startswith("linux"):
        return Probe(viable=False, reason="NIXL's wheels are for Linux only")
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        return Probe(viable=False, reason=f"NIXL is not installed: {INSTALL}")
    if importlib.util.find_spec(NEEDS) is None:
        return Probe(viable=False, reason=f"NIXL needs {NEEDS}: pip install {NEEDS}")
    wanted = backends or ("POSIX", "OBJ")
    if not any(has_backend(each) for each in wanted):
        return Probe(viable=False, reason=f"NIXL's plugins {', '.join(wanted)} are missing: {INSTALL}")
    return Probe()


def probe_pipe() -> Probe:
    """The probe of the pipe, which needs UCX."""
    found = probe("UCX")
    return Probe(viable=found.viable, reason=found.reason, domain=PeerIdentity.of_this_process().domain)


def has_backend(name: str) -> bool:
    """Whether NIXL's package contains the plugin. True if its plugins are not where the wheel has them."""
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        return False
    folder = Path(found.origin).parents[1] / f".{MODULE}.mesonpy.libs" / "plugins"
    return not folder.is_dir() or (folder / f"libplugin_{name}.so").is_file()
