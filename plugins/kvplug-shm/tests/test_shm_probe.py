"""Where the plugin says that it works, and what the kit says of it as a whole."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from kvplug.transport import PeerIdentity
from kvplug_shm import probe
from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("shm") == ()


def test_it_works_here() -> None:
    found = probe.describe()
    assert (found.viable, found.reason) == (True, "")
    assert found.domain == PeerIdentity.of_this_process().domain != "-"


def refused(*_: object) -> int:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        (sys, "maxsize", 2**31 - 1, "Python of 64 bits"),
        (os, "memfd_create", refused, "not implemented"),
    ],
)
def test_where_it_does_not_work_it_says_why(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any, said: str
) -> None:
    monkeypatch.setattr(where, name, value)
    found = probe.describe()
    assert not found.viable and said in found.reason


def test_a_python_without_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert "memfd_create" in probe.describe().reason
