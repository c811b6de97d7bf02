"""``kvplug bench`` without measuring: what is chosen, what is refused, and what is made of the figures."""

from __future__ import annotations

import errno
import platform
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from kvplug import ConfigError, PeerGoneError, Registry
from kvplug.errors import AmbiguousNameError, UnknownTransportError
from kvplug.transport import Capabilities, Probe, TransportSpec, hookimpl
from kvplug_bench import rounds
from kvplug_bench.candidate import MEMCPY, Candidate, baseline
from kvplug_bench.choice import transports
from kvplug_bench.command import bench
from kvplug_bench.links import UnavailableError
from kvplug_bench.plot import circumstances, save_plot
from kvplug_bench.rounds import Figures, Outcome, Plan, run_rounds
from kvplug_bench.rows import COLUMNS, Row, cells, compare, refused

MIB = 1 << 20
PLAN = Plan(sizes=(MIB,), rounds=3)


def dark() -> Probe:
    return Probe(viable=False, reason="it is night")


HERE = ModuleType("kvplug_bench_tests")  # a name that a spec can hold, which this module's own is not
HERE.dark = dark  # type: ignore[attr-defined]
sys.modules[HERE.__name__] = HERE


def offering(*specs: TransportSpec) -> Any:
    def kvplug_transports() -> list[TransportSpec]:
        return list(specs)

    return SimpleNamespace(kvplug_transports=hookimpl(kvplug_transports))


def spec(kind: str, name: str, **more: Any) -> TransportSpec:
    return TransportSpec(kind=kind, name=name, factory="kvplug_birds.heavy:Endpoint", **more)


@pytest.fixture
def birds() -> Registry:
    registry = Registry()
    plugin = offering(
        spec("pipe", "pigeon"),
        spec("queue", "pigeon"),
        spec("pipe", "owl", probe=f"{HERE.__name__}:dark"),
        spec("queue", "flock", capabilities=Capabilities(devices={"cuda"})),
        spec("pipe", "parrot", auto=False),
        spec("lookup_buffer", "nest"),
    )
    registry.register(plugin, name="birds", distribution="kvplug-birds")
    return registry


def chosen(registry: Registry, *names: str, **more: Any) -> list[Candidate]:
    given: dict[str, Any] = {"path": None, "overrides": (), "max_chunk_bytes": MIB, "max_chunks": 8} | more
    return transports(registry, names, **given)


# -- what is meant ---------------------------------------------------------------------------------


BOTH = ["pipe pigeon", "queue pigeon"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["pigeon"], BOTH),
        (["pigeon", "pipe:pigeon"], BOTH),
        (["queue:kvplug-birds:pigeon"], ["queue pigeon"]),
        ([], ["pipe owl", "pipe pigeon", "queue flock", "queue pigeon"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_name_means_every_kind_unless_it_states_one_and_no_name_all_that_auto_considers(
    birds, names, found
):
    candidates = chosen(birds, *names)
    assert [f"{each.kind} {each.name}" for each in candidates] == found
    if len(found) == 1:
        (only,) = candidates
        assert only.arguments["overrides"] == [f"queue={names[0].partition(':')[2]}"]
        assert only.arguments["max_chunks"] == 8


@pytest.mark.parametrize(
    ("name", "overrides", "error", "why"),
    [
        ("flok", [], UnknownTransportError, "no pipe or queue is named 'flok'; did you mean 'flock'"),
        ("nest", [], UnknownTransportError, "'nest', which is a lookup buffer; kvplug bench"),
        ("pipe:flock", [], UnknownTransportError, "no pipe is named 'flock', which is a queue"),
        ("owl", [], AmbiguousNameError, "use kvplug-birds:owl or kvplug-more:owl"),
        ("pigeon", ["options.pigeon.speed=3"], ConfigError, "'pigeon' takes no options"),
    ],
)
def test_a_wrong_name_or_configuration_is_refused_before_anything_is_measured(
    birds, name, overrides, error, why
):
    if error is AmbiguousNameError:
        birds.register(offering(spec("pipe", "owl")), name="more", distribution="kvplug-more")
    with pytest.raises(error, match=why):
        chosen(birds, name, overrides=overrides)


def test_what_cannot_work_here_is_skipped_with_the_reason(birds):
    assert [each.skipped_because for each in chosen(birds, "owl", "flock")] == [
        "it is night",
        "moves cuda tensors, but cpu tensors are needed",
    ]


def test_on_a_gpu_what_moves_cpu_tensors_is_skipped_and_bursts_are_larger(birds):
    devices = ("cuda:0", "cuda:1")
    skipped = {(each.name, each.kind): each.skipped_because for each in chosen(birds, devices=devices)}
    assert skipped == {
        ("owl", "pipe"): "it is night; moves cpu tensors, but cuda tensors are needed",
        ("pigeon", "pipe"): "moves cpu tensors, but cuda tensors are needed",
        ("pigeon", "queue"): "queues are measured with CPU tensors",
        ("flock", "queue"): "queues are measured with CPU tensors",
    }
    (copy,) = baseline("memcpy", {"pipe"}, devices)
    assert (copy.device(0), copy.skipped_because) == ("cuda:0", "")
    assert copy.burst_bytes > MEMCPY.burst_bytes
    (gloo,) = baseline("gloo", {"pipe"}, devices)
    assert gloo.skipped_because == "it moves CPU tensors"
    assert [gloo.device(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:1"]


# -- turns -----------------------------------------------------------------------------------------


def candidate(name: str, **more: Any) -> Candidate:
    return Candidate(**({"name": name, "kind": "pipe"} | more))


def test_everything_takes_its_turn_in_each_round(monkeypatch):
    turns: list[str] = []
    monkeypatch.setattr(rounds, "measure_once", lambda candidate, plan: turns.append(candidate.name) or [])
    told: list[tuple[str, int]] = []
    names = [candidate("a"), candidate("b"), candidate("c")]
    run_rounds(names, PLAN, lambda each, number: told.append((each.name, number)))
    assert "".join(turns) == "abcbcacab"
    assert told[0] == ("a", 0) and told[-1] == ("b", 2)


def test_no_round_is_begun_that_would_not_end_in_time(monkeypatch):
    clock = iter([100.0, 104.0, 109.0])
    monkeypatch.setattr(rounds.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(rounds, "measure_once", lambda candidate, plan: [])
    (outcome,) = run_rounds([candidate("a")], Plan(sizes=(MIB,), rounds=5, limit_s=10.0))
    assert len(outcome.rounds) == 2  # of 4 s and 5 s: three would take 13.5 s


def test_what_is_skipped_or_fails_is_left_out_and_the_others_go_on(monkeypatch):
    turns: list[str] = []

    def turn(candidate: Candidate, plan: Plan) -> list[Figures]:
        turns.append(candidate.name)
        if candidate.name == "lacks":
            raise UnavailableError("zmq is not installed")
        if candidate.name == "dies" and turns.count("dies") == 2:
            raise PeerGoneError("it is gone; it wrote:\nTraceback\nBoom\n")
        return [Figures(op="into", nbytes=MIB, gb_per_s=1.0)]

    monkeypatch.setattr(rounds, "measure_once", turn)
    known = candidate("known", skipped_because="it is night")
    outcomes = run_rounds([known, candidate("lacks"), candidate("dies"), candidate("works")], PLAN)
    assert [turns.count(name) for name in ("known", "lacks", "dies", "works")] == [0, 1, 2, 3]
    assert [each.skipped_because for each in outcomes] == [
        "it is night",
        "zmq is not installed",
        "failed: Boom",
        "",
    ]
    assert [each.failed for each in outcomes] == [False, False, True, False]
    assert "Traceback" in outcomes[2].last_output
    assert not outcomes[2].rounds


# -- rows ------------------------------------------------------------------------------------------


def outcome(name: str, *speeds: float, op: str = "into", **more: Any) -> Outcome:
    figures = [[Figures(op=op, nbytes=MIB, gb_per_s=speed, cpu_s_per_gb=0.5)] for speed in speeds]
    return Outcome(candidate=candidate(name, **more), rounds=figures)


def test_figures_are_medians_and_ratios_those_within_the_rounds():
    every = [
        outcome("ours", 2.0, 4.0, 9.0),
        outcome("memcpy", 4.0, 16.0, 10.0, kind="copy", baseline=True),
        outcome("slow", 1.0, 1.0, 1.0, baseline=True),
        outcome("fast", 2.0, 1.0, 3.0, baseline=True),
        outcome("other kind", 99.0, 99.0, 99.0, baseline=True, kind="queue"),
    ]
    (ours,) = compare(every[0], every)
    assert (ours.row.gb_per_s, ours.row.cpu_s_per_gb, ours.row.latency_us_p50) == (4.0, 0.5, None)
    assert ours.of_memcpy == 0.5
    assert (ours.best_baseline, ours.over_best) == ("fast", 3.0)
    (fast,) = compare(every[3], every)
    assert (fast.best_baseline, fast.over_best) == ("", None)


def test_of_a_latency_less_is_more():
    def waits(name: str, us: float, **more: Any) -> Outcome:
        latency = Figures(op="latency", nbytes=64, latency_us_p50=us, latency_us_p99=2 * us)
        woken = Figures(op="wake", nbytes=64, latency_us_p50=us, idle_cpu_percent=0.1)
        return Outcome(candidate=candidate(name, **more), rounds=[[latency, woken]])

    every = [waits("ours", 10.0), waits("gloo", 50.0, baseline=True), waits("zmq", 40.0, baseline=True)]
    latency, woken = compare(every[0], every)
    assert (latency.best_baseline, latency.over_best) == ("zmq", pytest.approx(4.0))
    assert (latency.row.latency_us_p99, latency.row.idle_cpu_percent) == (20.0, 0.1)
    assert woken.row.idle_cpu_percent == 0.1


def test_what_was_not_measured_is_one_row_that_says_why():
    skipped = Outcome(candidate=candidate("zmq"), skipped_because="zmq is not installed")
    (only,) = compare(skipped, [skipped])
    assert only.row == Row(
        name="zmq", kind="pipe", op=None, bytes=None, skipped_because="zmq is not installed"
    )
    assert cells(only, "")[-1] == "skipped: zmq is not installed"
    assert len(cells(only, "")) == len(COLUMNS)
    assert not refused(skipped, [MIB])


# -- the program -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--baseline", "memcpy,glo"], "no baseline is named 'glo'; did you mean 'gloo'?"),
        (["--sizes", "1MiB,64M"], "'M' is not a unit of size"),
        (["--sizes", "16"], "sizes must be multiples of 4, and at least 64 bytes; 16 B was given"),
        (["--idle", "soon"], "'soon' was given; allowed is a time of at least 0"),
        (["--device", "cpu,cuda"], "'cpu,cuda' is neither one device nor two of the same kind"),
        (["--plot", "a.jpg"], "'a.jpg' is not a .png or .svg file"),
        (["--plot", "/nope/a.svg"], "'/nope/a.svg' cannot be written: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_refused_before_anything_is_measured(arguments, why):
    done = CliRunner().invoke(bench, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert why in done.output


def test_what_is_missing_is_reported_with_how_to_install_it(site):
    code = "import sys; sys.modules['torch'] = None\nfrom kvplug.cli.main import main; main(['bench'])"
    done = site.run("-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert "torch is not installed: pip install torch" in done.stderr


@pytest.mark.parametrize("name", ["speed.svg", "speed.png"])
def test_a_plot_is_drawn_also_of_nothing(tmp_path, name):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [
        Row(name="memcpy", kind="copy", op="into", bytes=MIB, gb_per_s=14.0),
        Row(name="memcpy", kind="copy", op="into", bytes=64 * MIB, gb_per_s=6.0),
        Row(name="pigeon", kind="pipe", op="into", bytes=64 * MIB, gb_per_s=9.0),
        Row(name="owl", kind="pipe", op=None, bytes=None, skipped_because="it is night"),
    ]
    for shown in (rows[-1:], rows):
        save_plot(shown, str(tmp_path / name), footer=circumstances())
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"<?xml" if name.endswith("svg") else b"\x89PNG")
    assert name.endswith("png") or platform.node().encode() in data


def test_a_plot_that_cannot_be_written_in_the_end_costs_no_table(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr("kvplug_bench.command.run_rounds", lambda *_: [])
    monkeypatch.setattr(
        "kvplug_bench.command.save_plot", Mock(side_effect=OSError(errno.ENOSPC, "No space left"))
    )
    done = CliRunner().invoke(bench, ["--transport", "memory", "--plot", str(tmp_path / "x.png")])
    assert done.exit_code == 1 and not (tmp_path / "x.png").exists()
    assert "5 rounds, medians." in done.stdout and "cannot be written: No space left" in done.stderr
