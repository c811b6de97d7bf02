"""Which pipe two ends with GPUs get, of those that are installed."""

from __future__ import annotations

import attrs
import pytest

from kvplug import Registry
from kvplug.negotiation.select import Offer, select
from kvplug.transport import Probe
from kvplug.transport.capabilities import Requirements
from kvplug.transport.spec import Kind

GPU = Requirements(device="cuda")


@pytest.fixture
def offers() -> dict[str, Offer]:
    """All pipes, as an end offers them whose probes found everything."""
    specs = [spec for each in Registry.from_env().plugins for spec in each.specs if spec.kind is Kind.PIPE]
    if not {"cuda-ipc", "pynccl"} <= {spec.name for spec in specs}:
        pytest.skip("kvplug-cuda-ipc and kvplug-pynccl are not both installed")
    return {
        spec.name: Offer(
            name=spec.name,
            protocol=spec.protocol,
            capabilities=spec.capabilities,
            probe=Probe(domain="here"),
            auto=spec.auto,
        )
        for spec in specs
    }


def test_on_one_host_device_memory_is_shared(offers: dict[str, Offer]) -> None:
    here = list(offers.values())
    for nbytes in (1, 1 << 16, 1 << 24, 1 << 30):
        assert select(here, here, GPU, nbytes=nbytes).chosen == "cuda-ipc"


def test_where_it_cannot_be_another_one_is_taken(offers: dict[str, Offer]) -> None:
    here = list(offers.values())
    elsewhere = attrs.evolve(offers["cuda-ipc"], probe=Probe(domain="another container"))
    lacking = attrs.evolve(offers["cuda-ipc"], probe=Probe(viable=False, reason="no GPU"))
    for theirs in (elsewhere, lacking):
        there = list((offers | {"cuda-ipc": theirs}).values())
        assert select(here, there, GPU).chosen == select(there, here, GPU).chosen == "pynccl"
    assert select(here, here, attrs.evolve(GPU, cross_host=True)).chosen == "pynccl"
