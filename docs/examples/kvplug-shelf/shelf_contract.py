"""The connector "shelf" by the laws of kvplug's connectors, and the plugin by those of plugins."""

from __future__ import annotations

from pathlib import Path

from kvplug_shelf import folder
from kvplug_testing import ConnectorContract, check_plugin


class TestShelf(ConnectorContract):
    connector = "shelf"
    injects_into_own = True

    def inject_fault(self, how: str) -> None:
        """How loads fail: the kit asks for it, and only the connector's author knows where they can."""

        def read(path: Path) -> bytes:
            data = bytearray(path.read_bytes())
            if how and path.suffix:  # a rank's KV
                data[-1] ^= 1
                if how == "fail":
                    raise OSError("the disk is gone")
            return bytes(data)

        folder.READ = read
        self.later(lambda: setattr(folder, "READ", Path.read_bytes))


def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("shelf") == ()
