"""The plugin kvplug-pynccl: what it claims and probes, and ranks in a ring."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import pynccl_ends as ends
from kvplug import StatelessGroup
from kvplug_pynccl import plugin, probe
from kvplug_testing import check_plugin, peers

ENDS = Path(__file__).with_name("pynccl_ends.py")
PATIENCE_S = ends.PATIENCE_S


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


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("pynccl") == ()


def test_no_transport_claims_that_its_connections_are_proven() -> None:
    for spec in plugin.kvplug_transports():
        assert spec.capabilities.devices == {"cuda"}
        assert not spec.capabilities.authenticated


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
