"""Where the plugin says that it works."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from kvplug.transport import local_domain
from kvplug_shm import probe


def test_it_works_here() -> None:
    found = probe.describe()
    assert (found.viable, found.reason) == (True, "")
    assert found.domain == local_domain() != "-"


@pytest.mark.parametrize("machine", ["aarch64", "i686", "riscv64", ""])
def test_other_processors_store_in_other_orders(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = probe.describe()
    assert not found.viable
    assert f"64-bit {machine}" in found.reason


def test_a_narrow_python_has_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert "32-bit x86_64" in probe.describe().reason


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14"])
def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    found = probe.describe()
    assert not found.viable
    assert found.reason.endswith(system)


def test_a_python_without_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert "memfd_create" in probe.describe().reason


def test_a_system_without_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refused)
    found = probe.describe()
    assert not found.viable
    assert "not implemented" in found.reason


def test_asking_is_cheap() -> None:
    script = "import sys, kvplug_shm.probe as p; p.describe(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "zmq", "numpy", "ctypes"} & set(loaded.stdout.split())
