"""``check_plugin``: a plugin that keeps the laws passes, and each way to break one is told with its law."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest

from kvplug.config.schema import DEVICE_TYPES
from kvplug_testing import check_plugin
from kvplug_testing.laws import LAWS

PLUGIN = """\
from kvplug.engine import CommandSpec, ConnectorSpec, SinkSpec
from kvplug.transport import Capabilities, Cost, StoreSpec, TransportSpec, hookimpl

KVPLUG_API = (1, 0)


@hookimpl
def kvplug_transports():
    return [
        TransportSpec(
            kind="pipe",
            name="smoke",
            factory="kvplug_subject.heavy:Endpoint",
            options="kvplug_subject.light:Options",
            probe="kvplug_subject.light:describe",
            summary="Tensors as puffs of smoke",
            capabilities=Capabilities(devices={"cpu"}, cost=Cost(latency_us=1e6, gb_per_s=1e-6)),
        )
    ]


@hookimpl
def kvplug_connectors():
    return [
        ConnectorSpec(
            name="relay",
            factory="kvplug_subject.heavy:Scheduler",
            worker_factory="kvplug_subject.heavy:Worker",
            summary="Hands them on",
        )
    ]


@hookimpl
def kvplug_stores():
    return [
        StoreSpec(
            name="soot",
            factory="kvplug_subject.heavy:Soot",
            client="kvplug_subject.heavy:Chimney",
            summary="Keeps what has settled",
        )
    ]


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

class Scheduler:
    def __init__(self, context): ...

class Worker:
    def __init__(self, context): ...

class Soot:
    def __init__(self, context): ...

class Chimney:
    def __init__(self, context, link): ...

class Ash:
    def __init__(self, options): ...

@click.command()
def kindle(): ...
"""

README = (
    "It offers the pipe `smoke`, the connector `relay`, the store `soot`, the sink `ash` and the command"
    " `kvplug kindle`."
)


@attrs.frozen
class Fault:
    """One thing that is wrong with the plugin above, and what is said about it."""

    law: str
    said: str
    old: str = ""
    """What is replaced, in whichever of its files it stands."""
    new: str = ""
    more: str = ""
    """What is appended to the module of its entry point."""
    readme: str = README


FAULTS = {
    # being found
    "its module is not there": Fault(
        "PLUGIN-1", "No module named 'kvplug_other'", "import attrs", "", "import kvplug_other"
    ),
    "it says no API": Fault("PLUGIN-1", "does not state the plugin API", "KVPLUG_API", "API"),
    "it needs another plugin": Fault(
        "PLUGIN-1", "kvplug_neighbour, which is another plugin", more="import kvplug_neighbour.plugin"
    ),
    "it ends the process": Fault("PLUGIN-1", "exit code 7", more="import os\nos._exit(7)"),
    # light to load
    "its entry point is heavy": Fault(
        "PLUGIN-2", "the entry point (kvplug_subject.plugin) loads jax", more="import jax"
    ),
    "its probe is heavy": Fault(
        "PLUGIN-2",
        "the probe of the pipe smoke (kvplug_subject.light:describe) loads jax",
        "def describe():",
        "def describe():\n    import jax",
    ),
    "its probe opens a device": Fault(
        "PLUGIN-2",
        "opens /dev/kvplug-none",
        "def describe():",
        "def describe():\n    try:\n        open('/dev/kvplug-none')\n    except OSError:\n        pass",
    ),
    # claims
    "its probe never returns": Fault(
        "PLUGIN-3",
        "the probe of the pipe smoke (kvplug_subject.light:describe): it had not come",
        "return Probe(",
        "import time; time.sleep(100)\n    return Probe(",
    ),
    "its probe names no domain": Fault(
        "PLUGIN-3", "two hosts would be taken for one", 'domain="this valley"', ""
    ),
    "its cost is not stated": Fault(
        "PLUGIN-3", "the pipe smoke states no cost", ", cost=Cost(latency_us=1e6, gb_per_s=1e-6)", ""
    ),
    "it moves tensors of a device that is none": Fault(
        "PLUGIN-3", "'cuda0', which is no type of device; did you mean 'cuda'?", '{"cpu"}', '{"cpu", "cuda0"}'
    ),
    "its factory is not there": Fault(
        "PLUGIN-3", "cannot load kvplug_subject.heavy:End:", "heavy:Endpoint", "heavy:End"
    ),
    "its factory leaves something abstract": Fault(
        "PLUGIN-3",
        "the factory of the pipe smoke (kvplug_subject.heavy:Endpoint) is not what the spec says: TypeError:"
        " it cannot be made: abstract are connect",
        "class Endpoint:",
        "import kvplug\n\nclass Endpoint(kvplug.transport.PipeEndpoint):\n    def listen(self): ...",
    ),
    "the client of its store takes one argument": Fault(
        "PLUGIN-3",
        "the client of the store soot",
        "def __init__(self, context, link)",
        "def __init__(self, link)",
    ),
    # documented
    "it has no summary": Fault(
        "PLUGIN-4", "the sink ash has no summary", ', summary="Counts what is left"', ""
    ),
    "an option has no help": Fault(
        "PLUGIN-4",
        "the option 'puffs' of the pipe smoke has no help",
        "How many there are in a message.",
        " ",
    ),
    "it has no readme": Fault("PLUGIN-4", "kvplug-subject has no readme", readme=""),
    "its readme does not name the command": Fault(
        "PLUGIN-4", "does not name the command kindle", readme="`smoke`, `relay`, `ash`, kindle-wood"
    ),
}


CHECK = """
import json, sys
from kvplug_testing import check_plugin
from kvplug_testing import waits
from kvplug_testing.contract import base
waits.patience_s = float(sys.argv[2])
try:
    print(json.dumps([*check_plugin(sys.argv[1])]))
except AssertionError as e:
    sys.exit(str(e))
"""


def install(site: Any, fault: Fault = Fault("", "")) -> None:
    def faulty(text: str) -> str:
        return text.replace(fault.old, fault.new) if fault.old else text

    assert not fault.old or fault.old in PLUGIN + LIGHT + HEAVY
    site.add("neighbour", PLUGIN.replace("kvplug_subject", "kvplug_neighbour"))
    site.add(
        "subject",
        f"{faulty(PLUGIN)}\n{fault.more}\n",
        files={"light.py": faulty(LIGHT), "heavy.py": faulty(HEAVY)},
        readme=fault.readme,
    )
    (site.folder / "site" / "jax.py").write_text("")


def check(site: Any, fault: Fault = Fault("", ""), patience_s: float = 30.0) -> Any:
    install(site, fault)
    return site.run("-c", CHECK, "subject", str(patience_s))


def test_a_plugin_that_keeps_the_laws_passes(site: Any) -> None:
    done = check(site)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_breach_is_told_with_its_law_and_no_other_law(site: Any, fault: Fault) -> None:
    hangs = "had not come" in fault.said
    done = check(site, fault, 8.0 if hangs else 30.0)
    assert done.returncode == 1, "it was not noticed"
    told, _, laws = done.stderr.strip().partition("\n\n")
    first, *breaches = told.split("\n  - ")
    assert first.startswith("the plugin 'subject' breaks "), done.stderr
    assert all(breach.startswith(f"law {LAWS[fault.law]}: ") for breach in breaches), done.stderr
    assert any(fault.said in breach for breach in breaches), done.stderr
    assert laws == LAWS[fault.law].quoted, "what the law says is told once"


def test_the_types_of_devices_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as refused:
        torch.device("nothing")
    named = re.search(r"Expected one of (.+) device type", str(refused.value))
    assert named is not None
    assert {*named[1].split(", ")} <= {*DEVICE_TYPES}


@pytest.mark.full
def test_what_needs_a_library_that_is_not_here_is_not_judged_and_says_so(site: Any) -> None:
    done = check(site, Fault("", "", "import click", "import click, cupy"))
    assert done.returncode == 0, done.stderr
    reasons = json.loads(done.stdout)
    assert len(reasons) == 7  # everything is in one module
    assert "was not loaded: cupy is not installed here" in reasons[0]


def test_the_command_says_all_that_is_wrong(site: Any) -> None:
    install(site, Fault("", "", '"kvplug_subject.light:describe"', "None", readme=""))
    done = site.kvplug("check", "subject")
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("wrong: law ")]
    assert [line.split()[2] for line in wrong] == ["PLUGIN-3", "PLUGIN-4"]
    assert LAWS["PLUGIN-3"].quoted in done.stdout
    unknown = site.kvplug("check", "subjcet")
    assert unknown.returncode == 1
    assert "did you mean 'subject'?" in unknown.stderr


def test_the_core_keeps_what_it_asks_of_others() -> None:
    assert check_plugin("core") == ()


# -- as a part of a run ----------------------------------------------------------------------------


def judge(site: Any, *arguments: str) -> Any:
    """pytest, judging by the command line, where only the tests of plugins are selected."""
    report = site.folder / "card.json"
    done = site.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "PluginContract", "-W", "ignore"),
        *("--rootdir", str(site.folder), "--kvplug-report", str(report), *arguments),
    )
    return done, json.loads(report.read_text())["results"]


@pytest.mark.full
def test_judging_a_name_judges_the_plugin_that_offers_it(site: Any) -> None:
    install(site, FAULTS["an option has no help"])
    done, results = judge(site, "--kvplug-transport", "kvplug-subject:smoke")
    assert done.returncode == 1
    assert {result["subject"] for result in results} == {"plugin subject"}
    (failed,) = [result for result in results if result["outcome"] == "failed"]
    assert failed["laws"] == ["PLUGIN-4"]
    assert "the option 'puffs' of the pipe smoke has no help" in failed["reason"]
