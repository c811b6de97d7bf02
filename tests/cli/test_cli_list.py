"""``kvplug list``: what is installed, what works here, what can be set."""

from __future__ import annotations

import json
from typing import Any


def rows(birds: Any, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    done = birds.kvplug("list", "--json", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def listed(birds: Any, **environment: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in rows(birds, **environment)}


def test_everything_offered_is_listed_for_programs_with_why_it_cannot_work_here(birds: Any) -> None:
    found = listed(birds)
    pigeon = found["carrier-pigeon"]
    about = [pigeon[key] for key in ("kind", "distribution", "version", "status", "reason")]
    assert about == ["pipe", "kvplug-birds", "0.7", "ok", ""]
    assert pigeon["capabilities"]["devices"] == ["cpu", "cuda"]
    assert pigeon["capabilities"]["cross_host"] is True
    assert pigeon["capabilities"]["cost"] == {"latency_us": 9e9, "gb_per_s": 0.5}
    kinds = {"flock": "queue", "swarm": "communicator", "letter": "connector", "nest": "store"}
    kinds |= {"paper": "sink", "coo": "command"}
    assert {name: found[name]["kind"] for name in kinds} == kinds
    assert found["letter"]["capabilities"] is None
    assert (found["flock"]["status"], found["flock"]["reason"]) == ("unavailable", "it is night")
    crashed = found["swarm"]
    assert (crashed["status"], crashed["reason"]) == (
        "unavailable",
        "its probe failed: OSError: window closed",
    )


def test_what_is_made_for_tests_is_listed_only_when_asked_for(birds: Any) -> None:
    few, every = ({(each["kind"], each["name"]) for each in rows(birds, *all_)} for all_ in ((), ("--all",)))
    fakes = {("pipe", "memory"), ("store", "memory")}
    assert few < every and fakes <= every - few


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
    (birds.folder / "kvplug.toml").write_text('role = "both"\nconnector = "letter"\n')
    code = f"NAME, FILE = 'carrier-pigeon', {str(birds.folder / 'kvplug.toml')!r}\n{LOOKING}"
    done = birds.run("-c", code)  # beside every plugin that is installed here
    assert done.returncode == 0, done.stderr
    assert "carrier-pigeon" in done.stdout
    assert not (birds.package / "heavy.py.loaded").exists()


NOT_FOR_A_LIST = {
    *("click.shell_completion", "email.parser", "msgspec", "rich", "secrets", "signal"),
    *("kvplug.config.config", "kvplug.net.log", "kvplug.net.threads", "kvplug_pynccl.nccl.places"),
    *("kvplug_sample.options", "kvplug_shm.options"),
}


def test_a_list_loads_no_module_that_it_does_not_need(birds: Any) -> None:
    code = "import sys\nfrom kvplug.cli.main import program\nprogram(['list'], standalone_mode=False)\n"
    done = birds.run("-c", code + f"print({NOT_FOR_A_LIST!r} & sys.modules.keys())")
    assert done.stdout.endswith("set()\n"), done.stdout


def test_an_offer_that_is_asked_for_by_name_is_loaded_and_auto_passes_over_one_that_does_not_load(
    birds: Any,
) -> None:
    (birds.package / "heavy.py").write_text("import libpigeon")
    assert {each["status"] for each in rows(birds)} <= {"ok", "unavailable"}
    for name in ("carrier-pigeon", "letter", "coo"):
        said = " ".join(birds.kvplug("list", name).stdout.split())
        assert f"{name}' from kvplug-birds: cannot load" in said and "No module named 'libpigeon'" in said
        assert [each["status"] for each in rows(birds, name)] == ["broken"]
    explained = birds.kvplug("explain", "role=both", "connector=letter", "stores=memory")
    assert "No module named 'libpigeon'" in " ".join(explained.stdout.split())


def test_broken_and_blocked_plugins_are_listed_with_their_reasons(birds: Any) -> None:
    birds.add_bad()
    birds.add("off", "KVPLUG_API = (1, 0)")
    found = listed(birds, KVPLUG_DISABLE_PLUGINS="off")
    assert (found["bad"]["kind"], found["bad"]["status"]) == ("plugin", "broken")
    assert "a_module_that_is_not_there" in found["bad"]["reason"]
    assert (found["off"]["status"], found["off"]["capabilities"]) == ("blocked", None)
    text = birds.kvplug("list", "--kind", "queue", COLUMNS="200", KVPLUG_DISABLE_PLUGINS="off").stdout
    assert "carrier-pigeon" not in text
    assert "a_module_that_is_not_there" in text
    assert "named in KVPLUG_DISABLE_PLUGINS" in text


def test_a_name_with_two_owners_is_listed_twice_as_ambiguous(birds: Any) -> None:
    birds.add(
        "more",
        "from kvplug.transport import TransportSpec, hookimpl\nKVPLUG_API = (1, 0)\n"
        "@hookimpl\ndef kvplug_transports():\n"
        "    return [TransportSpec(kind='pipe', name='carrier-pigeon', factory='a:b')]",
    )
    found = [each for each in rows(birds) if each["name"] == "carrier-pigeon"]
    assert [each["distribution"] for each in found] == ["kvplug-birds", "kvplug-more"]
    assert {each["status"] for each in found} == {"ambiguous"}
    assert "use kvplug-birds:carrier-pigeon or kvplug-more:carrier-pigeon" in found[0]["reason"]


def test_options_of_a_name_are_shown_with_types_units_and_defaults(birds: Any) -> None:
    text = birds.kvplug("list", "--options", "carrier-pigeon").stdout
    assert "pipe carrier-pigeon (kvplug-birds 0.7), [options.carrier-pigeon]" in text
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    for name, parts in {
        "birds": ("whole number, at least 1", "How many fly at once."),
        "message_bytes": ("bytes", "1 MiB"),
        "rest_s": ("0.5 s",),
    }.items():
        assert all(part in lines[name] for part in parts)
    (found,) = rows(birds, "--options", "kvplug-birds:carrier-pigeon")
    assert found["kind"] == "pipe"
    assert found["options"][0] == {
        "name": "birds",
        "type": "whole number, at least 1",
        "unit": "",
        "default": "2",
        "help": "How many fly at once.",
    }
    assert "takes no options" in birds.kvplug("list", "--options", "flock").stdout


def test_options_of_an_unknown_name_suggest_the_nearest_and_repeat_what_failed(birds: Any) -> None:
    birds.add_bad()
    done = birds.kvplug("list", "--options", "carrier_pigon")
    assert done.returncode == 1
    assert "did you mean 'carrier-pigeon'?" in done.stderr
    assert "broken: bad (kvplug-bad 1.0): ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr
