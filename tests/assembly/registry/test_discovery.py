"""Plugins are found, judged and loaded one by one: with real metadata on a real path, in real processes."""

from __future__ import annotations

import ast
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug.assembly.registry import discovery
from kvplug.errors import PluginLoadError

HEADER = """\
from kvplug.engine import CommandSpec, ConnectorSpec
from kvplug.transport import Capabilities, TransportSpec, hookimpl
KVPLUG_API = (1, 0)
"""

PIPE = """
@hookimpl
def kvplug_transports():
    return [TransportSpec(kind="pipe", name="{name}", factory="nowhere.at_all:Endpoint")]
"""


def pipe(name: str) -> str:
    return HEADER + PIPE.format(name=name)


def hook(body: str, name: str = "kvplug_transports", mark: str = "@hookimpl") -> str:
    """A plugin with one hook."""
    return f"{HEADER}{mark}\ndef {name}():\n    {body}"


@pytest.fixture(autouse=True)
def neighbour(site: Any) -> None:
    """A plugin beside the one under test, which must work whatever the other does."""
    site.add("neighbour", pipe("near"))


def test_a_plugin_is_found_by_its_entry_point_and_a_later_optional_hook_passed_over(site: Any) -> None:
    later = "@hookimpl(optionalhook=True)\ndef kvplug_prophets():\n    return [object()]\n"
    site.add("good", pipe("smoke-signal") + later, version="3.2.1")
    found = site.plugin("good")
    assert (found["status"], found["reason"], found["api"]) == ("ok", "", [1, 0])
    assert (found["version"], found["offers"]) == ("3.2.1", ["smoke-signal"])


BROKEN = {
    "import": (HEADER + "import a_module_that_is_not_there", "ModuleNotFoundError"),
    "syntax": ("def f(:", "SyntaxError"),
    "exit on import": (HEADER + "raise SystemExit('configure me first')", "SystemExit: configure me first"),
    "error in hook": (hook("raise RuntimeError('no luck')"), "RuntimeError: no luck"),
    "not a list": (hook("return 7"), "7, not a list"),
    "bad name": (pipe("Not A Name"), "cannot be a name"),
    "misspelt hook": (
        hook("return []", "kvplug_transport"),
        "there is no hook named kvplug_transport; did you mean kvplug_transports? the hooks are kvplug",
    ),
    "unmarked hook": (hook("return []", mark=""), "not marked with kvplug.transport.hookimpl"),
    "no hook": (HEADER, "implements no hook"),
    "twice": (pipe("x").replace("]", ", *[TransportSpec(kind='pipe', name='x', factory='a:b')]]"), "twice"),
    "no API": (pipe("x").replace("KVPLUG_API", "API"), "add KVPLUG_API = (1, 0)"),
    "API not a literal": (pipe("x").replace("(1, 0)", "tuple([1, 0])"), "not a literal"),
    "next major": (pipe("x").replace("(1, 0)", "(2, 0)"), "upgrade kvplug"),
    "next minor": (pipe("x").replace("(1, 0)", "(1, 99)"), "needs plugin API 1.99, and this kvplug has 1.0"),
}


UNIMPORTED = ("no API", "API not a literal", "next major", "last major", "next minor")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_kept_with_its_reason_and_stops_no_other(site: Any, case: str) -> None:
    source, reason = BROKEN[case]
    site.add("bad", source)
    bad, near = site.evaluate(
        "found = [p for p in registry.plugins if p.name in ('bad', 'neighbour')]\n"
        "answer = [[p.name, p.status, p.reason, len(p.specs)] for p in found]"
    )
    assert near == ["neighbour", "ok", "", 1]
    assert (bad[1], bad[3]) == ("broken", 0)
    assert reason in bad[2] and "\n" not in bad[2]
    if case in UNIMPORTED:  # nor is its package
        assert site.marked() == {"kvplug_neighbour", "kvplug_neighbour.plugin"}


@pytest.mark.parametrize(
    ("entry_point", "reason"),
    [
        ("kvplug_bad.nothing", "there is no module kvplug_bad.nothing"),
        ("not_here.plugin", "not_here is not an installed package"),
        (
            "kvplug_bad.plugin:missing",
            "its entry point names missing in the module, but must name only the module: bad = ",
        ),
        (
            "kvplug_bad.plugin:kvplug_transports",
            "names kvplug_transports in the module, but must name only the module: bad = ",
        ),
    ],
)
def test_an_entry_point_that_leads_nowhere_or_to_a_hook_is_broken(
    site: Any, entry_point: str, reason: str
) -> None:
    site.add("bad", pipe("x"), entry_point=entry_point)
    assert reason in site.plugin("bad")["reason"]


def test_the_error_for_a_name_that_nothing_offers_explains_how_a_plugin_is_found(site: Any) -> None:
    message = site.evaluate(
        "from kvplug.transport.spec import Kind\n"
        "try:\n"
        "    registry.get(Kind.PIPE, 'some-other')\n"
        "except PluginError as e:\n"
        "    answer = str(e)"
    )
    assert "a plugin is found by its entry point in the group 'kvplug'" in message


def test_the_error_for_a_name_of_another_kind_names_that_kind(site: Any) -> None:
    site.add("good", pipe("other"))
    message = site.evaluate(
        "from kvplug.transport.spec import Kind\n"
        "try:\n"
        "    registry.get(Kind.CONNECTOR, 'other')\n"
        "except PluginError as e:\n"
        "    answer = str(e)"
    )
    assert "'other' is the name of a transport" in message
    assert "pyproject.toml" not in message


def test_a_disabled_plugin_is_not_even_imported(site: Any) -> None:
    site.add("good", pipe("x"))
    found = site.plugin("good", KVPLUG_DISABLE_PLUGINS=" good , another")
    assert (found["status"], found["reason"]) == ("blocked", "named in KVPLUG_DISABLE_PLUGINS")
    assert site.marked() == {"kvplug_neighbour", "kvplug_neighbour.plugin"}


def failed(site: Any, **environment: str) -> list[str]:
    """The error of loading the plugins, line by line."""
    code = f"""
    from kvplug.errors import PluginLoadError
    try:
        Registry.from_env({environment!r})
        answer = ""
    except (PluginLoadError, ConfigError) as e:
        answer = f"{{type(e).__name__}}: {{e}}"
    """
    return str(site.evaluate(code)).splitlines()


def test_strict_mode_raises_with_every_plugin_that_does_not_load(site: Any) -> None:
    site.add("bad", BROKEN["import"][0])
    site.add("worse", BROKEN["exit on import"][0])
    message = "\n".join(failed(site, KVPLUG_STRICT_PLUGINS="1"))
    assert message.startswith("PluginLoadError: ")
    assert "bad (kvplug-bad 1.0): ModuleNotFoundError" in message
    assert "worse (kvplug-worse 1.0): SystemExit: configure me first" in message
    assert not failed(site, KVPLUG_STRICT_PLUGINS="1", KVPLUG_DISABLE_PLUGINS="bad,worse")
    (message,) = failed(site, KVPLUG_STRICT_PLUGINS="perhaps")
    assert message.startswith("ConfigError: ") and "allowed is 1 or 0" in message


def test_a_distribution_found_twice_is_one_plugin_and_the_first_on_the_path_is_it(site: Any) -> None:
    site.add("good", pipe("x"), version="2.0")
    site.add("good", pipe("x"), version="1.0", where="older")
    site.add_metadata("kvplug.good", "1.0", "good = kvplug_good.plugin", where="older")  # spelt otherwise
    site.path.append(site.folder / "older")
    found = site.plugin("good")
    assert (found["status"], found["version"]) == ("ok", "2.0")


def test_broken_metadata_of_one_distribution_hides_no_other_plugin(site: Any) -> None:
    (site.add_metadata("damaged", "1.0") / "entry_points.txt").write_bytes(b"[kvplug]\n\xff\xfe = \xff")
    site.add("good", pipe("x"))
    assert site.plugin("good")["status"] == "ok"


def test_no_two_threads_parse_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11 that is a SystemError now and then, and a plugin of the user's counts as broken."""
    inside, found = [], []

    def slow(source: str, module: str) -> ast.Module:
        inside.append(source)
        time.sleep(0.02)
        found.append(len(inside))
        inside.pop()
        return ast.parse(source, module)

    def look() -> None:
        with pytest.raises(PluginLoadError, match="does not state"):
            discovery.stated_api("ast")

    monkeypatch.setattr(discovery, "ast", SimpleNamespace(**{**vars(ast), "parse": slow}))
    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [1] * 4
