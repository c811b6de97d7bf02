"""The plugin as a whole: found, light to load, what its specs say, and documented."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvplug.transport import Kind
from kvplug_cpu import plugin
from kvplug_testing import check_plugin


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("cpu") == ()


def test_it_offers_its_transports_by_strings_alone() -> None:
    pipe, communicator = plugin.kvplug_transports()
    assert (pipe.kind, pipe.name, pipe.load_factory().__name__) == (Kind.PIPE, "cpu", "CpuEndpoint")
    assert (communicator.kind, communicator.name) == (Kind.COMMUNICATOR, "cpu")
    assert communicator.load_factory().__name__ == "CpuCommunicator"
    assert pipe.load_options() is not None
    assert communicator.load_options() is None  # it has none
    assert pipe.run_probe().viable and communicator.run_probe().viable


def test_describing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvplug_cpu import plugin;"
        "[(spec.run_probe(), spec.load_options()) for spec in plugin.kvplug_transports()];"
        "print([n for n in ('torch', 'numpy', 'zmq', 'kvplug_cpu.endpoint') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
