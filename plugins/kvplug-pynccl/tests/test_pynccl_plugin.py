"""The plugin kvplug-pynccl: what it offers and probes, what it costs to describe, and ranks in a ring."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import pynccl_ends as ends
from kvplug import StatelessGroup
from kvplug_pynccl import plugin, probe
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint
from kvplug_testing import check_plugin, peers

ENDS = Path(__file__).with_name("pynccl_ends.py")

PATIENCE_S = ends.PATIENCE_S

# -- ranks ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_three_ranks_are_joined_in_a_ring(fake_path: str) -> None:
    with StatelessGroup.listen("unix:") as listener:
        address = listener.address
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                peers.start(f"{ENDS}:in_ring", *(fake_path, address, rank, 3), timeout_s=3 * PATIENCE_S)
            )
            for rank in range(3)
        ]
        seen = [rank.result(2 * PATIENCE_S) for rank in ranks]
    assert seen == [[2, 1, 0], [0, 2, 1], [1, 0, 2]]


# -- the plugin ----------------------------------------------------------------------------------------


def test_the_plugin_offers_the_pipe_by_strings_alone() -> None:
    (spec,) = [each for each in plugin.kvplug_transports() if each.kind == "pipe"]
    assert spec.name == "pynccl"
    assert spec.capabilities.devices == {"cuda"}
    assert not spec.capabilities.authenticated
    assert spec.load_options() is PyncclPipeOptions
    assert spec.load_factory() is PyncclEndpoint


def test_describing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvplug_pynccl import plugin; specs = plugin.kvplug_transports();"
        "[(spec.run_probe(), spec.load_options()) for spec in specs];"
        "print([n for n in ('torch', 'numpy', 'kvplug_pynccl.pipe.endpoint') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_probe_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_path: str
) -> None:
    monkeypatch.setattr(probe, "_DEV", tmp_path)
    assert "no GPU" in probe.describe().reason
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("KVPLUG_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))
    assert "KVPLUG_NCCL_LIBRARY" in probe.describe().reason
    monkeypatch.setenv("KVPLUG_NCCL_LIBRARY", fake_path)
    assert probe.describe().viable


def test_it_keeps_the_laws_of_plugins() -> None:
    from importlib.metadata import entry_points

    if not entry_points(group="kvplug", name="pynccl"):
        pytest.skip("kvplug-pynccl is not installed here")
    assert check_plugin("pynccl") == ()
