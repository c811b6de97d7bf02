"""Plans of faults: how they are read, what is refused, and that seed and numbers alone decide. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug import Config, ConfigError, PluginError, Registry, build_queue
from kvplug.cli.list import lines_of
from kvplug.config import check_options, describe_options, option_fields
from kvplug.transport.spec import Kind, TransportSpec
from kvplug_testing import plugin
from kvplug_testing.faults import FaultSchedule, Plan, Rule, read_plan, schedule
from kvplug_testing.faults.options import FaultyOptions
from kvplug_testing.faults.plan import PARAMETERS

TEXT = """
seed = 7

[[rules]]
do = "delay"
message = 7
seconds = "200 ms"

[[rules]]
do = "disconnect"
after = "3 MiB"

[[rules]]
do = "flip"
message = 4
min_bytes = "4 KiB"

[[rules]]
do = "stop"
direction = "recv"
seconds = 2
"""
PLAN = Plan(
    seed=7,
    rules=[
        Rule(do="delay", message=7, seconds=0.2),
        Rule(do="disconnect", after=3 << 20),
        Rule(do="flip", message=4, min_bytes=4096),
        Rule(do="stop", direction="recv", seconds=2.0),
    ],
)


def numbers(plan: Plan, sizes: list[int], **more: Any) -> list[list[int]]:
    """Positions of the rules that hit each message."""
    return [[hit.position for hit in hits] for hits in schedule(plan, sizes, **more)]


# -- how they are read ---------------------------------------------------------------------------


def test_a_plan_is_read_from_text_from_a_table_and_from_files(tmp_path: Path) -> None:
    import tomllib

    table = tomllib.loads(TEXT)
    (tmp_path / "faults.toml").write_text(TEXT)
    (tmp_path / "faults.json").write_text(json.dumps(table))
    sources: list[Any] = [TEXT, table, tmp_path / "faults.toml", str(tmp_path / "faults.json")]
    assert [read_plan(source) for source in sources] == [PLAN] * 4


def test_a_plan_without_rules_is_a_plan() -> None:
    assert read_plan({}) == read_plan("seed = 0") == Plan()


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ({}, "do: must be given"),
        ({"do": "flop"}, "did you mean 'flip'?"),
        ({"do": "delay"}, "seconds: must be given with delay"),
        ({"do": "slow"}, "bytes_per_s: must be given with slow"),
        ({"do": "raise"}, "error: must be given with raise"),
        ({"do": "raise", "error": "OSError"}, "error: 'OSError' was given"),
        ({"do": "drop", "seconds": 1}, "seconds: has no meaning with drop, only with delay or stop"),
        ({"do": "drop", "message": 1, "every": 2}, "every: message is given too"),
        ({"do": "drop", "message": 0}, "message: 0 was given; allowed is at least 1"),
        ({"do": "drop", "probability": 1.5}, "probability: 1.5 was given"),
        ({"do": "drop", "after": "3M"}, "say MB (powers of 1000) or MiB (powers of 1024)"),
        ({"do": "kill", "direction": "recv", "min_bytes": 1}, "its size is unknown"),
        ({"do": "drop", "mesage": 4}, "mesage: not a known key; did you mean 'message'?"),
        ("drop", "a rule: 'drop' was given"),
    ],
)
def test_a_rule_that_means_nothing_is_refused_and_told_why(rule: Any, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan({"rules": [{"do": "drop"}, rule]})
    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith("rule 2: ")
    assert fault in caught.value.faults[0]


def test_every_fault_of_a_plan_is_told_at_once() -> None:
    rules = [{"do": "delay", "bits": 3, "every": 0}, {"do": "drop"}, {"direction": "up"}]
    with pytest.raises(ConfigError) as caught:
        read_plan({"seed": "x", "rule": [], "rules": rules})
    told = [fault.partition(": ")[0] for fault in caught.value.faults]
    assert sorted(told) == ["rule", "rule 1", "rule 1", "rule 1", "rule 3", "rule 3", "seed"]


def test_a_rule_made_in_python_is_checked_the_same() -> None:
    with pytest.raises(ConfigError, match="seconds: must be given with delay"):
        Rule(do="delay")


@pytest.mark.parametrize("given", ["nowhere.toml", "faults.yaml", "rules = 3", "seed = [", ""])
def test_what_is_no_plan_is_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        read_plan(given)


def test_every_parameter_of_an_action_is_a_field_of_a_rule() -> None:
    assert set(PARAMETERS) < set(option_fields(Rule))
    assert all(row.help for row in describe_options(Rule))


# -- which messages are hit ------------------------------------------------------------------------

DROP: dict[str, Any] = {"do": "drop"}


@pytest.mark.parametrize(
    ("rule", "hit"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"message": 4}, [4]),
        ({"every": 3}, [3, 6]),
        ({"every": 2, "times": 2}, [2, 4]),
        ({"after": 250}, [4, 5, 6]),
        ({"after": 250, "times": 1}, [4]),
        ({"after": 0, "every": 5}, [5]),
        ({"min_bytes": 101}, []),
        ({"direction": "recv"}, []),
        ({"pipe": 2}, []),
    ],
)
def test_a_rule_hits_the_messages_that_it_names(rule: dict[str, Any], hit: list[int]) -> None:
    found = numbers(Plan(rules=[Rule(**DROP, **rule)]), [100] * 6)
    assert [number for number, rules in enumerate(found, start=1) if rules] == hit


def test_small_messages_are_neither_counted_nor_hit() -> None:
    plan = Plan(rules=[Rule(do="flip", message=2, min_bytes=50), Rule(do="drop", message=2)])
    assert numbers(plan, [100, 1, 1, 100, 100]) == [[], [2], [], [1], []]


def test_a_pipe_has_its_own_number() -> None:
    plan = Plan(rules=[Rule(do="drop", pipe=2, message=1)])
    assert numbers(plan, [1], pipe=2) == [[1]]


rules = st.builds(
    Rule,
    do=st.just("drop"),
    direction=st.sampled_from(["send", "recv"]),
    every=st.none() | st.integers(1, 5),
    after=st.none() | st.integers(0, 2000),
    probability=st.floats(0.01, 1),
    times=st.none() | st.integers(1, 4),
    min_bytes=st.integers(0, 300),
)
plans = st.builds(Plan, seed=st.integers(), rules=st.lists(rules, max_size=4))
sizes = st.lists(st.integers(0, 500), max_size=40)


@given(plans, sizes)
def test_the_same_seed_hits_the_same_messages_with_the_same_bits(plan: Plan, sizes: list[int]) -> None:
    first, second = schedule(plan, sizes), schedule(plan, sizes)
    assert first == second
    chances = [[[hit.random().random() for hit in hits] for hits in each] for each in (first, second)]
    assert chances[0] == chances[1]


@given(plans, sizes, st.lists(st.integers(0, 39)))
def test_asking_does_not_change_what_is_hit(plan: Plan, sizes: list[int], asked: list[int]) -> None:
    """However often a call is tried again, with whatever in between."""
    course, found = FaultSchedule(plan, "send"), []
    for number, nbytes in enumerate(sizes):
        for _ in range(asked.count(number)):
            course.hits(nbytes)
            course.hits(None)
        found.append(tuple(course.advance(nbytes)))
    assert tuple(found) == schedule(plan, sizes)


@given(plans, sizes)
def test_what_could_hit_a_message_of_unknown_size_holds_what_does(plan: Plan, sizes: list[int]) -> None:
    course = FaultSchedule(plan, "recv")
    for nbytes in sizes:
        possible = course.hits(None)
        assert [hit for hit in possible if nbytes >= hit.rule.min_bytes] == course.hits(nbytes)
        course.advance(nbytes)


@given(plans, rules, sizes)
def test_a_rule_that_is_added_changes_nothing_for_those_before_it(
    plan: Plan, rule: Rule, sizes: list[int]
) -> None:
    more = Plan(seed=plan.seed, rules=[*plan.rules, rule])
    old = [tuple(hit for hit in hits if hit.position <= len(plan.rules)) for hits in schedule(more, sizes)]
    assert tuple(old) == schedule(plan, sizes)


def test_another_seed_hits_others_and_about_as_many() -> None:
    hit = []
    for seed in (1, 2):
        plan = Plan(seed=seed, rules=[Rule(do="drop", probability=0.25)])
        hit.append({number for number, found in enumerate(numbers(plan, [1] * 2000)) if found})
    assert hit[0] != hit[1]
    assert all(400 < len(each) < 600 for each in hit)


def test_another_process_hits_the_same() -> None:
    program = (
        "from kvplug_testing.faults import *;"
        "plan = Plan(seed=5, rules=[Rule(do='flip', probability=0.3)]);"
        "print([hit.random().random() for hits in schedule(plan, [1] * 50) for hit in hits])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert "0." in found.pop()


# -- in a config -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.from_env()


def config(faulty: dict[str, Any] | None, **more: Any) -> Config:
    options = {} if faulty is None else {"faulty": faulty}
    return Config.from_dict({"transport": "faulty", "role": "both", "options": options, **more})


def faults_of(config: Config, registry: Registry, *keys: str) -> tuple[str, ...]:
    from kvplug.assembly.resolve import ResolvedConfig

    with pytest.raises(ConfigError) as caught:
        ResolvedConfig(config, registry).check(keys=keys or ("transport",))
    return caught.value.faults


def test_the_options_are_read_like_any_others() -> None:
    options = check_options(FaultyOptions, {"plan": TEXT}, where="options.faulty")
    assert (options.inner, options.rules) == ("auto", PLAN)
    assert [row.name for row in describe_options(FaultyOptions)] == ["inner", "plan"]


def test_a_plan_stands_in_a_config_as_a_table_too() -> None:
    from kvplug.assembly.resolve import ResolvedConfig

    table = TEXT.replace("[[rules", "[[options.faulty.plan.rules")
    found = Config.from_toml(f'transport = "faulty"\n[options.faulty.plan]\n{table}')
    assert check_options(FaultyOptions, found.options["faulty"]).rules == PLAN
    ResolvedConfig(found, Registry.from_env()).check(keys=("transport",))


def test_a_plan_that_is_missing_is_told_at_config_time(registry: Registry) -> None:
    (fault,) = faults_of(config(None), registry)
    assert fault.startswith("options.faulty.plan: must be given")


def test_faults_of_a_plan_and_of_the_inner_transport_are_told_together(
    registry: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "faults.toml"
    file.write_text('[[rules]]\ndo = "delay"\n[[rules]]\ndo = "flop"\n')
    faults = faults_of(config({"inner": "nothing-such", "plan": str(file), "sed": 1}), registry)
    assert len(faults) == 4
    assert any(fault.startswith("options.faulty.inner: ") and "nothing-such" in fault for fault in faults)
    plans = [fault for fault in faults if fault.startswith("options.faulty.plan: ")]
    assert ["rule 1: seconds" in plans[0], "rule 2: do" in plans[1]] == [True, True]
    assert all(fault.endswith(f"[{file}]") for fault in plans)


def test_faulty_over_faulty_is_refused(registry: Registry) -> None:
    (fault,) = faults_of(config({"inner": "faulty", "plan": {}}), registry)
    assert fault.startswith("options.faulty.inner: 'faulty' wraps another transport itself")


def test_it_is_listed_and_never_chosen_by_auto(registry: Registry) -> None:
    from kvplug.assembly.resolve import ResolvedConfig

    lines = [line for line in lines_of(registry, everything=True) if line.name == "faulty"]
    assert [line.kind for line in lines] == ["pipe", "queue"]
    assert {(line.distribution, line.status, line.capabilities) for line in lines} == {
        ("kvplug-testing", "ok", None)
    }
    offered = ResolvedConfig(Config.from_dict({"role": "both"}), registry).offers()
    assert "faulty" not in [offer.name for offer in offered]


def test_to_its_peer_an_end_with_faults_is_one_of_the_inner_transport(registry: Registry) -> None:
    from kvplug.assembly.resolve import ResolvedConfig

    for inner in ("memory", "auto"):
        parts = ResolvedConfig(config({"inner": inner, "plan": {}}), registry)
        assert parts.requested_transport == inner
        assert parts.offers() == ResolvedConfig(Config.from_dict({"role": "both"}), registry).offers()


@pytest.mark.parametrize("kind", [Kind.LOOKUP_BUFFER, Kind.COMMUNICATOR])
def test_only_pipes_and_queues_go_around_others(kind: Kind) -> None:
    with pytest.raises(PluginError, match="only a pipe or a queue"):
        TransportSpec(kind=kind, name="x", factory="a:b", wraps=True)


# -- of a message queue ----------------------------------------------------------------------------


def of_queue(faulty: dict[str, Any], **more: Any) -> Config:
    return Config.from_dict({"queue": "faulty", "options": {"faulty": faulty, **more}})


def test_faults_of_a_plan_and_of_the_inner_options_are_told_together(registry: Registry) -> None:
    found = of_queue({"inner": "memory", "plan": {"rules": [{"do": "delay"}]}}, memory={"spin": 1})
    faults = faults_of(found, registry, "queue")
    assert [fault for fault in faults if fault.startswith("options.faulty.plan: rule 1: seconds")]
    assert "options.memory: the queue 'memory' takes no options" in faults


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        ("memroy", "no message queue named 'memroy'; did you mean 'memory'?"),
        ("cpu", "no message queue named 'cpu'"),
        ("faulty", "'faulty' wraps another transport itself"),
    ],
)
def test_what_cannot_be_inside_a_queue_is_told_at_config_time(
    registry: Registry, inner: str, told: str
) -> None:
    (fault,) = faults_of(of_queue({"inner": inner, "plan": {}}), registry, "queue")
    assert fault.startswith(f"options.faulty.inner: {told}")


@pytest.mark.parametrize("options", [{}, {"faulty": {}}])
def test_a_pipe_and_a_queue_share_one_table_and_its_faults_are_told_once(
    registry: Registry, options: dict[str, Any]
) -> None:
    both = {"transport": "faulty", "queue": "faulty"}
    (fault,) = faults_of(Config.from_dict({**both, "options": options}), registry, *both)
    assert fault.startswith("options.faulty.plan: must be given")


def test_an_inner_name_of_both_has_to_be_one_of_both_kinds(registry: Registry) -> None:
    from kvplug.assembly.resolve import ResolvedConfig

    both = {"transport": "faulty", "queue": "faulty"}
    ResolvedConfig(config({"inner": "memory", "plan": {}}, queue="faulty"), registry).check(keys=both)
    faults = faults_of(config({"inner": "nothing-such", "plan": {}}, queue="faulty"), registry, *both)
    assert len(faults) == 2
    assert ["transport named" in faults[0], "message queue named" in faults[1]] == [True, True]


def test_an_inner_queue_is_chosen_with_auto_as_for_queues() -> None:
    registry = Registry()
    registry.register(plugin, name="testing")  # whatever else is installed
    with pytest.raises(PluginError, match="no message queue can be had"):
        build_queue(of_queue({"plan": {}}), registry=registry)
