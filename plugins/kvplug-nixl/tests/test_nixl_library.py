"""The environment that NIXL's libraries read while an agent is made."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvplug_nixl.library import nixl
from kvplug_nixl.probe import probe

pytestmark = pytest.mark.skipif(not probe().viable, reason=probe().reason or "NIXL is here")
C = ctypes.CDLL(None)


def in_c(name: bytes) -> bytes | None:
    getenv = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p)(("getenv", C))
    found: bytes | None = getenv(name)
    return found


def in_a_child(name: str) -> str:
    return subprocess.run(["printenv", name], capture_output=True, text=True).stdout.strip()


def test_c_libraries_find_variables_only_while_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLUG_TEST_OLD", "old")
    monkeypatch.delenv("KVPLUG_TEST_LATER", raising=False)
    with nixl({"KVPLUG_TEST_OLD": "other", "KVPLUG_TEST_NEW": "new"}):
        assert (in_c(b"KVPLUG_TEST_OLD"), in_c(b"KVPLUG_TEST_NEW")) == (b"other", b"new")
        assert os.environ["KVPLUG_TEST_OLD"] == "old" and "KVPLUG_TEST_NEW" not in os.environ
        monkeypatch.setenv("KVPLUG_TEST_LATER", "later")  # as another thread may do
    assert (in_c(b"KVPLUG_TEST_OLD"), in_c(b"KVPLUG_TEST_NEW")) == (b"old", None)
    assert (in_c(b"KVPLUG_TEST_LATER"), in_a_child("KVPLUG_TEST_LATER")) == (b"later", "later")
    assert (in_a_child("KVPLUG_TEST_OLD"), in_a_child("KVPLUG_TEST_NEW")) == ("old", "")


def test_a_thread_that_is_in_getenv_meanwhile_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It searches the array that it has found; setenv would extend or free that one."""
    with nixl({}):
        pass  # the libraries set variables of their own when they are loaded
    monkeypatch.setenv("KVPLUG_TEST_OLD", "old")
    pointers = ctypes.POINTER(ctypes.c_void_p)

    def searched() -> Any:
        return ctypes.cast(ctypes.c_void_p.in_dll(C, "environ"), pointers)

    def variables(array: Any) -> list[int]:
        return list(itertools.takewhile(bool, array))

    before = searched()
    found = variables(before)
    with nixl({f"KVPLUG_TEST_{number}": "new" for number in range(9)}):
        meanwhile = searched()
        found_meanwhile = variables(meanwhile)
        assert variables(before) == found
    assert variables(before) == found
    assert variables(meanwhile) == found_meanwhile


STORE = """
import sys
from kvplug import Config, build_store

config = {"stores": ["nixl"], "timeout_s": 30, "options": {"nixl": {"path": sys.argv[1], "size": "1MiB"}}}
with build_store(Config.from_dict(config)):
    print("nixl_cu12._api" in sys.modules)
"""


def test_it_is_loaded_before_the_first_request_of_a_store(output_of: Any, tmp_path: Path) -> None:
    assert output_of(STORE, str(tmp_path)) == "True\n"
