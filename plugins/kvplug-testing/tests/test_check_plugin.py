"""``check_plugin``: a plugin that keeps the laws passes, and each breach is reported with its law."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import check_plugin
from kvplug_testing.laws import LAWS

PLUGIN = """\
from kvplug.engine import CommandSpec, ConnectorSpec, SinkSpec
from kvplug.transport import Capabilities, StoreSpec, TransportSpec, hookimpl
KVPLUG_API = (1, 0)

@hookimpl
def kvplug_transports():
    return [TransportSpec(
        kind="pipe", name="smoke", factory="kvplug_subject.heavy:Endpoint", summary="Tensors as smoke",
        options="kvplug_subject.light:Options", probe="kvplug_subject.light:describe",
        capabilities=Capabilities(devices={"cpu"}, cost=Capabilities.Cost(latency_us=1e6, gb_per_s=1e-6)),
    )]

@hookimpl
def kvplug_connectors():
    factories = {"factory": "kvplug_subject.heavy:Scheduler", "worker_factory": "kvplug_subject.heavy:Worker"}
    return [ConnectorSpec(name="relay", summary="Hands them on", **factories)]

@hookimpl
def kvplug_stores():
    factories = {"factory": "kvplug_subject.heavy:Soot", "client": "kvplug_subject.heavy:Chimney"}
    return [StoreSpec(name="soot", summary="Keeps what has settled", **factories)]

@hookimpl
def kvplug_sinks():
    return [SinkSpec(name="ash", factory="kvplug_subject.heavy:Ash", summary="Counts what is left")]

@hookimpl
def kvplug_commands():
    return [CommandSpec(name="kindle", target="kvplug_subject.heavy:kindle", summary="Light the fire")]
"""
LIGHT = """\
import attrs
from kvplug.transport import Probe, option

@attrs.frozen
class Options:
    puffs: int = option(3, help="How many there are in a message.")

def describe():
    return Probe(domain="this valley")
"""
HEAVY = """\
import click

class Endpoint:
    def __init__(self, context): ...
class Scheduler(Endpoint): ...
class Worker(Endpoint): ...
class Soot(Endpoint): ...
class Ash(Endpoint): ...
class Chimney:
    def __init__(self, context, link): ...

@click.command()
def kindle(): ...
"""
README = (
    "It offers the pipe `smoke`, the connector `relay`, the store `soot`, the sink `ash` and `kvplug kindle`."
)
FAULTS = tomllib.loads(Path(__file__).with_name("faulty_plugins.toml").read_text())
NO_CHANGE = ("", "")

CHECK = """
import json, sys
from kvplug_testing import check_plugin, waits
waits.patience_s = float(sys.argv[2])
try:
    print(json.dumps([*check_plugin(sys.argv[1])]))
except AssertionError as e:
    sys.exit(str(e))
"""


def check(site: Any, old: str, new: str, patience_s: float = 20.0) -> Any:
    """Check the plugin after that change."""
    assert old in PLUGIN + LIGHT + HEAVY + README
    plugin, light, heavy, readme = (
        text.replace(old, new) if old else text for text in (PLUGIN, LIGHT, HEAVY, README)
    )
    site.add("neighbour", PLUGIN.replace("kvplug_subject", "kvplug_neighbour"))
    site.add("subject", plugin, files={"light.py": light, "heavy.py": heavy}, readme=readme)
    (site.folder / "site" / "jax.py").write_text("")
    return site.run("-c", CHECK, "subject", str(patience_s))


def test_a_plugin_that_keeps_the_laws_passes(site: Any) -> None:
    done = check(site, *NO_CHANGE)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_breach_is_reported_with_its_law_and_no_other_law(site: Any, fault: dict[str, str]) -> None:
    law, message = LAWS[fault["law"]], fault["message"]
    done = check(site, fault["old"], fault["new"], 4.0 if "had not come" in message else 20.0)
    assert done.returncode == 1, "it was not noticed"
    listed, _, laws = done.stderr.strip().partition("\n\n")
    first, *breaches = listed.split("\n  - ")
    assert first.startswith("the plugin 'subject' breaks "), done.stderr
    assert all(breach.startswith(f"law {law}: ") for breach in breaches), done.stderr
    assert any(message in breach for breach in breaches), done.stderr
    assert laws == law.quoted, "the text of the law is quoted once"


@pytest.mark.full
def test_what_needs_a_missing_library_is_not_judged_and_is_reported(site: Any) -> None:
    done = check(site, "import click", "import click, cupy")
    assert done.returncode == 0, done.stderr
    reasons = json.loads(done.stdout)
    assert len(reasons) == 7  # everything is in one module
    assert "was not loaded: cupy is not installed here" in reasons[0]


@pytest.mark.full
def test_the_command_and_a_run_of_the_suite_report_all_that_is_wrong(site: Any) -> None:
    check(site, "How many there are in a message.", " ")
    done = site.kvplug("check", "subject")
    wrong = "the option 'puffs' of the pipe smoke has no help"
    assert (done.returncode, done.stdout.splitlines()[1]) == (1, f"  - law {LAWS['PLUGIN-4']}: {wrong}")
    assert LAWS["PLUGIN-4"].quoted in done.stdout
    unknown = site.kvplug("check", "subjcet")
    assert unknown.returncode == 1
    assert "did you mean 'subject'?" in unknown.stdout
    report = site.folder / "card.json"
    site.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "PluginContract", "-W", "ignore"),
        *("--rootdir", str(site.folder), "--kvplug-report", str(report)),
        *("--kvplug-transport", "kvplug-subject:smoke"),
    )
    results = json.loads(report.read_text())["results"]
    assert {result["subject"] for result in results} == {"plugin subject"}
    (failed,) = [result for result in results if result["outcome"] == "failed"]
    assert failed["laws"] == ["PLUGIN-4"]
    assert wrong in failed["reason"]


def test_the_core_keeps_what_it_asks_of_others() -> None:
    assert check_plugin("core") == ()
