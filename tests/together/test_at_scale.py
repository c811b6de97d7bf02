"""``benchmarks/at_scale.py``: its simulation beside closed formulas, and its model beside real engines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (BENCHMARKS / "scale").exists(), reason="the benchmarks are not here"),
]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of the package."""
    pytest.importorskip("kvplug_host")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("cluster", "constants", "model", "simulate")
    yield SimpleNamespace(**{name: importlib.import_module(f"scale.{name}") for name in names})
    for name in [name for name in sys.modules if name == "scale" or name.startswith("scale.")]:
        del sys.modules[name]


def simulated(scale: Any, engines: int, *, seconds: float = 500, seed: int = 1, **more: Any) -> Any:
    """Counts of a run whose loads take no time. ``more``: of the topology, the simulation, the workload."""
    topology = {name: more.pop(name) for name in ("group", "routed", "stores") if name in more}
    given = {name: more.pop(name) for name in ("is_full", "stored_pages") if name in more}
    simulation = scale.simulate.Simulation(
        engines,
        scale.cluster.Topology(name="tested", **topology),
        scale.simulate.Workload(**{"requests": 2.0, "answer_s": 0.1, "cache_units": 0, **more}),
        bytes_per_s=1e15,
        seed=seed,
        **given,
    )
    return simulation.run(warm_s=0, seconds=seconds)


def test_without_sharing_an_engine_computes_what_the_law_of_random_visits_predicts(scale: Any) -> None:
    """A turn d turns back is not at a random one of n engines with (1 - 1/n) to the power of d; turns are
    geometric, and go on with a. Of all units that prompts have, q (1 - a) / (1 - q a) are computed, with q =
    1 - 1/n."""
    for engines in (2, 8):
        counts = simulated(
            scale,
            engines,
            seconds=10_000 / engines,
            group=1,
            is_full=False,
            store_units=1 << 20,
            system_units=0,
            think_s=1.0,
        )
        q, a = 1 - 1 / engines, 1 - 1 / 6
        assert counts.computed / counts.units == pytest.approx(q * (1 - a) / (1 - q * a), rel=0.05)


@pytest.mark.full
@pytest.mark.timing
def test_real_engines_count_what_the_model_predicts(scale: Any) -> None:
    pytest.importorskip("kvplug_lookup")
    eight = importlib.import_module("scale.eight")
    requests = eight.trace(16, 3)
    assert [seen for seen, _ in eight.counted(requests, 3)] == eight.predicted(requests, 3)
