"""``kvplug list``: what is installed, what works here, what can be set."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import Any

import click
import pytest

HEADER = """\
from kvplug.engine import CommandSpec, ConnectorSpec, SinkSpec
from kvplug.transport import Capabilities, Cost, TransportSpec, hookimpl
KVPLUG_API = (1, 0)
"""

FULL = (
    HEADER
    + """
@hookimpl
def kvplug_transports():
    return [
        TransportSpec(kind="pipe", name="carrier-pigeon", factory="kvplug_birds.heavy:Endpoint",
                      options="kvplug_birds.light:Options", probe="kvplug_birds.light:describe",
                      summary="Tensors by air", capabilities=Capabilities(
                          devices={"cpu", "cuda"}, cross_host=True, authenticated=False,
                          cost=Cost(latency_us=9e9, gb_per_s=0.5))),
        TransportSpec(kind="queue", name="flock", factory="kvplug_birds.heavy:Queue",
                      probe="kvplug_birds.light:no_luck"),
        TransportSpec(kind="communicator", name="nest", factory="kvplug_birds.heavy:Comm",
                      probe="kvplug_birds.light:crash"),
    ]

@hookimpl
def kvplug_connectors():
    return [ConnectorSpec(name="letter", factory="kvplug_birds.heavy:S", worker_factory="a:b")]

@hookimpl
def kvplug_sinks():
    return [SinkSpec(name="paper", factory="kvplug_birds.heavy:Sink")]

@hookimpl
def kvplug_commands():
    return [CommandSpec(name="coo", target="kvplug_birds.heavy:coo", summary="Make a sound")]
"""
)

LIGHT = """
import attrs
from kvplug.transport import Probe, option

@attrs.frozen(kw_only=True)
class Options:
    birds: int = option(2, help="How many fly at once.", at_least=1)
    message_bytes: int = option(2**20, help="What one carries.", unit="bytes")
    rest_s: float = option(0.5, help="Between flights.", unit="seconds")

def describe():
    return Probe(domain="sky")

def no_luck():
    return Probe(viable=False, reason="it is night")

def crash():
    raise OSError("window closed")
"""

HEAVY = """
import click
open(__file__ + ".loaded", "w").close()

class Endpoint:
    pass

@click.command()
@click.option("--loud", is_flag=True)
def coo(loud):
    click.echo("COO" if loud else "coo")
"""


@pytest.fixture
def birds(site: Any) -> Any:
    site.package = site.add("birds", FULL, version="0.7", files={"light.py": LIGHT, "heavy.py": HEAVY})
    return site


def listed(site: Any, **environment: str) -> dict[str, dict[str, Any]]:
    done = site.kvplug("list", "--json", **environment)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)}


def test_everything_offered_is_listed_for_programs(birds: Any) -> None:
    found = listed(birds)
    pigeon = found["carrier-pigeon"]
    assert {key: pigeon[key] for key in ("name", "kind", "distribution", "version", "status", "reason")} == {
        "name": "carrier-pigeon",
        "kind": "pipe",
        "distribution": "kvplug-birds",
        "version": "0.7",
        "status": "ok",
        "reason": "",
    }
    assert pigeon["capabilities"]["devices"] == ["cpu", "cuda"]
    assert pigeon["capabilities"]["cross_host"] is True
    assert pigeon["capabilities"]["cost"] == {"latency_us": 9e9, "gb_per_s": 0.5}
    assert [found[name]["kind"] for name in ("flock", "nest", "letter", "paper", "coo")] == [
        "queue",
        "communicator",
        "connector",
        "sink",
        "command",
    ]
    assert found["letter"]["capabilities"] is None


def test_what_is_made_for_tests_is_listed_only_when_asked_for(birds: Any) -> None:
    def names(*arguments: str) -> set[tuple[str, str]]:
        done = birds.kvplug("list", "--json", *arguments)
        return {(each["kind"], each["name"]) for each in json.loads(done.stdout)}

    fakes = {("pipe", "memory"), ("pipe", "around"), ("queue", "memory"), ("connector", "memory")}
    assert not fakes & names()
    assert fakes <= names("--all")
    assert names() < names("--all")


def test_what_cannot_work_on_this_host_says_why(birds: Any) -> None:
    found = listed(birds)
    assert (found["flock"]["status"], found["flock"]["reason"]) == ("unavailable", "it is night")
    assert found["nest"]["status"] == "unavailable"
    assert found["nest"]["reason"] == "its probe failed: OSError: window closed"


LOOKING = """
import sys
from kvplug.cli.main import main
for arguments in (["list", "--all"], ["--help"], ["list", "--options", NAME], ["config", "show"],
                  ["config", "check", FILE]):
    try:
        main(arguments)
    except SystemExit as e:
        assert not e.code, arguments
assert sys.modules.keys().isdisjoint(("torch", "zmq", "numpy")), "heavy"
"""


def test_what_only_looks_loads_no_code_of_offers(birds: Any) -> None:
    done = birds.kvplug("list", "--json", "--all")
    assert {"carrier-pigeon", "memory"} <= {each["name"] for each in json.loads(done.stdout)}
    (birds.folder / "kvplug.toml").write_text('role = "both"\nconnector = "letter"\n')
    code = f"NAME, FILE = 'carrier-pigeon', {str(birds.folder / 'kvplug.toml')!r}\n{LOOKING}"
    done = birds.run("-c", code)  # beside every plugin that is installed here
    assert done.returncode == 0, done.stderr
    assert not (birds.package / "heavy.py.loaded").exists()


@pytest.mark.parametrize("name", ["carrier-pigeon", "letter", "coo"])
def test_an_offer_that_is_asked_for_by_name_is_loaded(birds: Any, name: str) -> None:
    (birds.package / "heavy.py").write_text("import libpigeon")
    assert {each["status"] for each in listed(birds).values()} <= {"ok", "unavailable"}
    done = birds.kvplug("list", name)
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    for part in (f"{name}' from kvplug-birds: cannot load", "No module named 'libpigeon'"):
        assert part in said
    (found,) = json.loads(birds.kvplug("list", "--json", name).stdout)
    assert found["status"] == "broken"


def test_a_pipe_that_does_not_load_is_passed_over_by_auto(birds: Any) -> None:
    (birds.package / "heavy.py").write_text("import libpigeon")
    explained = birds.kvplug("explain", "role=both", "connector=letter", "stores=memory")
    assert "No module named 'libpigeon'" in " ".join(explained.stdout.split())


def test_broken_and_blocked_plugins_are_listed_with_their_reasons(birds: Any) -> None:
    birds.add("bad", HEADER + "import a_module_that_is_not_there")
    birds.add("off", HEADER)
    found = listed(birds, KVPLUG_DISABLE_PLUGINS="off")
    assert (found["bad"]["kind"], found["bad"]["status"]) == ("plugin", "broken")
    assert "a_module_that_is_not_there" in found["bad"]["reason"]
    assert (found["off"]["status"], found["off"]["capabilities"]) == ("blocked", None)
    text = birds.kvplug("list", "--kind", "queue", COLUMNS="200", KVPLUG_DISABLE_PLUGINS="off").stdout
    assert "carrier-pigeon" not in text
    assert "a_module_that_is_not_there" in text
    assert "named in KVPLUG_DISABLE_PLUGINS" in text


def test_a_name_with_two_owners_is_listed_twice_as_ambiguous(birds: Any) -> None:
    other = HEADER + (
        "@hookimpl\ndef kvplug_transports():\n"
        "    return [TransportSpec(kind='pipe', name='carrier-pigeon', factory='a:b')]"
    )
    birds.add("more", other)
    done = birds.kvplug("list", "--json")
    found = [each for each in json.loads(done.stdout) if each["name"] == "carrier-pigeon"]
    assert [each["distribution"] for each in found] == ["kvplug-birds", "kvplug-more"]
    assert {each["status"] for each in found} == {"ambiguous"}
    assert "say kvplug-birds:carrier-pigeon or kvplug-more:carrier-pigeon" in found[0]["reason"]


def test_the_table_is_plain_text_in_a_pipe(birds: Any) -> None:
    lines = birds.kvplug("list", "--long").stdout.splitlines()
    assert lines[0].split()[:5] == ["NAME", "KIND", "FROM", "VERSION", "STATUS"]
    row = next(line for line in lines if line.startswith("carrier-pigeon"))
    assert "cpu+cuda, any host, not authenticated, 0.5 GB/s" in row
    assert row.endswith("Tensors by air")
    assert "\x1b" not in "".join(lines)


def test_each_offer_has_a_line_below_its_kind(birds: Any) -> None:
    lines = birds.kvplug("list").stdout.splitlines()
    at = lines.index("pipe")
    pigeon = next(line for line in lines[at:] if line.split()[0] == "carrier-pigeon")
    assert pigeon.split(None, 1)[1] == "Tensors by air"
    flock = next(line for line in lines[lines.index("queue") :] if line.split()[0] == "flock")
    assert flock.split(None, 1)[1] == "unavailable: it is night"


def test_one_kind_and_one_name(birds: Any) -> None:
    kinds = [line for line in birds.kvplug("list", "--kind", "queue").stdout.splitlines() if line[:1] != " "]
    assert kinds[0] == "queue" and "pipe" not in kinds
    whole = birds.kvplug("list", "carrier-pigeon").stdout
    for part in ("pipe carrier-pigeon", "Tensors by air", "cpu+cuda, any host", "kvplug-birds 0.7"):
        assert part in whole
    assert "flock" not in whole
    for arguments, said in (
        (("--kind", "quue"), "did you mean 'queue'"),
        (("pigeon",), "nothing named 'pigeon'"),
    ):
        done = birds.kvplug("list", *arguments)
        assert done.returncode == 1 and said in done.stderr


def drawn(birds: Any, arguments: list[str], columns: int, **environment: str) -> str:
    """What the program writes to a terminal."""
    reader, writer = pty.openpty()
    code = f"from kvplug.cli.main import main; main({arguments})"
    path = f"{birds.folder / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "COLUMNS": str(columns), "TERM": "xterm"}
        | environment,
        stdout=writer,
    )
    os.close(writer)
    seen = b""
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    assert child.wait(30) == 0
    os.close(reader)
    return seen.decode()


def test_a_line_is_no_longer_than_the_terminal_is_wide_or_80_columns(birds: Any) -> None:
    birds.add("birds", FULL.replace("Tensors by air", "Tensors by air, " * 9 + "over land"), version="0.7")
    for arguments in (["list"], ["list", "carrier-pigeon"]):
        for columns, text in (
            (100, click.unstyle(drawn(birds, arguments, 100))),
            (80, birds.kvplug(*arguments).stdout),
        ):
            assert columns - 20 < max(map(len, text.splitlines())) <= columns
            assert "by air, over land" in " ".join(text.split())
    assert "carrier-pigeon" in drawn(birds, ["list", "--long"], 200)


def test_a_terminal_has_colours_unless_no_color_is_set(birds: Any) -> None:
    assert "\x1b[33m" in drawn(birds, ["list"], 80, NO_COLOR="")
    assert "\x1b" not in drawn(birds, ["list"], 80, NO_COLOR="1")


def test_the_title_of_options_is_shown_as_it_is(birds: Any) -> None:
    assert "[options.carrier-pigeon]" in drawn(birds, ["list", "--options", "carrier-pigeon"], 120)


def test_options_of_a_name_are_shown_with_types_units_and_defaults(birds: Any) -> None:
    text = birds.kvplug("list", "--options", "carrier-pigeon").stdout
    assert "pipe carrier-pigeon (kvplug-birds 0.7), [options.carrier-pigeon]" in text
    rows = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert "whole number, at least 1" in rows["birds"]
    assert "How many fly at once." in rows["birds"]
    assert "bytes" in rows["message_bytes"]
    assert "1 MiB" in rows["message_bytes"]
    assert "0.5 s" in rows["rest_s"]


def test_options_are_there_for_programs(birds: Any) -> None:
    (found,) = json.loads(birds.kvplug("list", "--options", "kvplug-birds:carrier-pigeon", "--json").stdout)
    assert found["kind"] == "pipe"
    assert found["options"][0] == {
        "name": "birds",
        "type": "whole number, at least 1",
        "unit": "",
        "default": "2",
        "help": "How many fly at once.",
    }


def test_what_takes_no_options_says_so(birds: Any) -> None:
    assert "takes no options" in birds.kvplug("list", "--options", "flock").stdout


def test_options_of_an_unknown_name_suggest_the_nearest_and_repeat_what_failed(birds: Any) -> None:
    birds.add("bad", HEADER + "import a_module_that_is_not_there")
    done = birds.kvplug("list", "--options", "carrier_pigon")
    assert done.returncode == 1
    assert "did you mean 'carrier-pigeon'?" in done.stderr
    assert "broken: bad (kvplug-bad 1.0): ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_of_a_name_that_nothing_is_near_say_how_plugins_are_found(birds: Any) -> None:
    info = birds.add_metadata("kvplug-mine", "1.0", "mine = kvplug_mine.plugin")
    (info / "entry_points.txt").write_text("[kv_plug]\nmine = kvplug_mine.plugin\n")
    found_by = (
        "a plugin is found by its entry point in the group 'kvplug';"
        " after a change of its pyproject.toml it must be installed again"
    )
    done = birds.kvplug("list", "--options", "mine")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "kvplug: nothing named 'mine' is installed",
        f"  {found_by}",
        "  kvplug-mine declares entry points in the group 'kv_plug'; did you mean 'kvplug'?",
    ]


def test_options_that_are_misspelt_in_the_spec_say_whose(birds: Any) -> None:
    birds.add("birds", FULL.replace("light:Options", "light:Option"), version="0.7")
    done = birds.kvplug("list", "--options", "carrier-pigeon")
    assert done.returncode == 1
    whose = "kvplug: the options of the pipe 'carrier-pigeon' from kvplug-birds"
    assert done.stderr.startswith(f"{whose}: cannot load kvplug_birds.light:Option: AttributeError: ")
    assert done.stderr.endswith("; did you mean 'Options'?\n")
