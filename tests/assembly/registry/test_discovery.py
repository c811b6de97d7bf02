"""Plugins are found, judged and loaded one by one: with real metadata on a real path, in real processes."""

from __future__ import annotations

import ast
import shutil
import threading
import time
from pathlib import Path
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


def hook(body: str, name: str = "kvplug_transports", mark: str = "@hookimpl", given: str = "") -> str:
    """A plugin with one hook."""
    return f"{HEADER}{mark}\ndef {name}({given}):\n    {body}"


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
    "null byte": ("\0", "cannot read"),
    "exit on import": (HEADER + "raise SystemExit('configure me first')", "SystemExit: configure me first"),
    "error in hook": (hook("raise RuntimeError('no luck')"), "RuntimeError: no luck"),
    "exit in hook": (hook("raise SystemExit(3)"), "SystemExit: 3"),
    "not a list": (hook("return 7"), "7, not a list"),
    "not a spec": (hook("return ['cpu']"), "not a TransportSpec"),
    "bad name": (pipe("Not A Name"), "cannot be a name"),
    "reserved name": (pipe("auto"), "has a meaning"),
    "bad factory": (pipe("x").replace("nowhere.at_all:Endpoint", "nowhere"), "factory must be"),
    "misspelt hook": (
        hook("return []", "kvplug_transport"),
        "no hook is called kvplug_transport; did you mean kvplug_transports? there are kvplug_transports,",
    ),
    "unknown hook": (
        hook("return []", "kvplug_x"),
        "no hook is called kvplug_x; there are kvplug_transports",
    ),
    "devices in one string": (
        pipe("x").replace("factory=", "capabilities=Capabilities(devices='cpu'), factory="),
        "devices must be a set of names, such as {'cpu'}; got 'cpu'",
    ),
    "bad kind": (pipe("x").replace("pipe", "pip"), "kind: 'pip' was given; allowed is pipe, queue, "),
    "unmarked hook": (hook("return []", mark=""), "not marked with kvplug.transport.hookimpl"),
    "argument": (hook("return []", given="config"), "config"),
    "wrapper": (hook("return (yield)", mark="@hookimpl(wrapper=True)"), "is a wrapper"),
    "no hook": (HEADER, "implements no hook"),
    "twice": (pipe("x").replace("]", ", *[TransportSpec(kind='pipe', name='x', factory='a:b')]]"), "twice"),
    "no API": (pipe("x").replace("KVPLUG_API", "API"), "add KVPLUG_API = (1, 0)"),
    "API not a literal": (pipe("x").replace("(1, 0)", "tuple([1, 0])"), "not a literal"),
    "API not a pair": (pipe("x").replace("(1, 0)", "1"), "a pair of whole numbers is needed"),
    "API of booleans": (pipe("x").replace("(1, 0)", "(True, False)"), "a pair of whole numbers is needed"),
    "API in a branch": (pipe("x").replace("KVPLUG_API", "if True: KVPLUG_API"), "does not state"),
    "next major": (pipe("x").replace("(1, 0)", "(2, 0)"), "upgrade kvplug"),
    "last major": (pipe("x").replace("(1, 0)", "(0, 9)"), "upgrade the plugin"),
    "next minor": (pipe("x").replace("(1, 0)", "(1, 99)"), "needs plugin API 1.99, and this kvplug has 1.0"),
}


UNIMPORTED = ("no API", "API not a literal", "next major", "last major", "next minor")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_kept_with_its_reason_and_stops_no_other(site: Any, case: str) -> None:
    source, reason = BROKEN[case]
    site.add("bad", source)
    bad, near = site.ask(
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
        ("not_here.plugin", "not_here is not a package that is installed"),
        ("not_here", "there is no module not_here"),
        ("kvplug_bad.plugin.deeper", "kvplug_bad.plugin is not a package"),
        (
            "kvplug_bad.plugin:missing",
            "has no attribute 'missing'; its entry point names missing in the module, and must name",
        ),
        (
            "kvplug_bad.plugin:kvplug_transports",
            "names kvplug_transports in the module, and must name the module alone: bad = ",
        ),
    ],
)
def test_an_entry_point_that_leads_nowhere_or_to_a_hook_is_broken(
    site: Any, entry_point: str, reason: str
) -> None:
    site.add("bad", pipe("x"), entry_point=entry_point)
    assert reason in site.plugin("bad")["reason"]


def test_an_entry_point_may_name_an_object_in_its_module(site: Any) -> None:
    source = HEADER + "class Offers:\n    @hookimpl\n    def kvplug_transports(self):\n"
    source += "        return [TransportSpec(kind='pipe', name='x', factory='a:b')]\noffers = Offers()\n"
    site.add("object", source, entry_point="kvplug_object.plugin:offers")
    assert site.plugin("object")["offers"] == ["x"]


HINT = (
    "a plugin is found by its entry point in the group 'kvplug';"
    " after a change of its pyproject.toml it must be installed again"
)
UNKNOWN = """
from kvplug.transport import Kind
try:
    registry.get(Kind.PIPE, {name!r})
except PluginError as e:
    answer = str(e).splitlines()[2:]
"""


def grouped(site: Any, group: str) -> None:
    """A distribution whose entry point is in another group."""
    info = site.add_metadata("kvplug-mine", "1.0", "mine = kvplug_mine.plugin")
    (info / "entry_points.txt").write_text(
        f"[console_scripts]\na = b:c\n[{group}]\nmine = kvplug_mine.plugin\n"
    )


def unknown(site: Any, name: str) -> list[str]:
    """What is said of an unknown name, beyond what is known."""
    lines: list[str] = site.ask(UNKNOWN.format(name=name))
    return [line.strip() for line in lines]


def test_a_plugin_that_nobody_declared_is_told_how_plugins_are_found(site: Any) -> None:
    assert unknown(site, "some-other") == [HINT]
    assert unknown(site, "neer") == []
    site.add("bad", BROKEN["import"][0])
    (line,) = unknown(site, "neer")
    assert line.startswith("broken: bad (kvplug-bad 1.0): ModuleNotFoundError")


def test_a_group_that_looks_like_ours_is_named_and_another_is_left_alone(site: Any) -> None:
    for group in ("kvplugs", "kv_plug", "KVPLUG", "kvplug.plugins"):
        grouped(site, group)
        line = f"kvplug-mine declares entry points in the group {group!r}; did you mean 'kvplug'?"
        assert unknown(site, "some-other") == [HINT, line]
        assert unknown(site, "neer") == [line]
    for group in ("plugins", "kvplug_rdma.drivers", "pytest11"):
        grouped(site, group)
        assert unknown(site, "some-other") == [HINT]


def test_a_plugin_may_be_a_single_module_or_in_a_zip_file(site: Any, tmp_path: Path) -> None:
    (site.folder / "site" / "lonely.py").write_text(pipe("x"))
    site.add_metadata("lonely", "1.0", "lonely = lonely")
    site.add("zipped", pipe("y"), where="unpacked")
    site.path.append(shutil.make_archive(str(tmp_path / "plugins"), "zip", tmp_path / "unpacked"))
    assert (site.plugin("lonely")["offers"], site.plugin("zipped")["offers"]) == (["x"], ["y"])


def test_a_plugin_without_source_cannot_show_its_api(site: Any) -> None:
    package = site.add("bare", pipe("x"))
    site.run("-m", "compileall", "-q", "-b", str(package))
    (package / "plugin.py").unlink()
    assert "no source" in site.plugin("bare")["reason"]


def test_a_disabled_plugin_is_not_even_imported(site: Any) -> None:
    site.add("good", pipe("x"))
    found = site.plugin("good", KVPLUG_DISABLE_PLUGINS=" good , another")
    assert (found["status"], found["reason"]) == ("blocked", "named in KVPLUG_DISABLE_PLUGINS")
    assert site.marked() == {"kvplug_neighbour", "kvplug_neighbour.plugin"}


def test_disabling_what_is_not_there_is_told(site: Any) -> None:
    done = site.run("-c", "from kvplug import Registry; Registry.from_env()", KVPLUG_DISABLE_PLUGINS="ghost")
    assert "'ghost', and no such plugin is installed" in done.stderr


def failed(site: Any, **environment: str) -> list[str]:
    """The error of loading the plugins, line by line."""
    code = f"""
    try:
        Registry.from_env({environment!r})
        answer = ""
    except (PluginLoadError, ConfigError) as e:
        answer = f"{{type(e).__name__}}: {{e}}"
    """
    return str(site.ask(code)).splitlines()


def test_strict_mode_raises_with_every_plugin_that_does_not_load(site: Any) -> None:
    site.add("bad", BROKEN["import"][0])
    site.add("worse", BROKEN["exit on import"][0])
    said = "\n".join(failed(site, KVPLUG_STRICT_PLUGINS="1"))
    assert said.startswith("PluginLoadError: ")
    assert "bad (kvplug-bad 1.0): ModuleNotFoundError" in said
    assert "worse (kvplug-worse 1.0): SystemExit: configure me first" in said
    assert not failed(site, KVPLUG_STRICT_PLUGINS="1", KVPLUG_DISABLE_PLUGINS="bad,worse")
    (said,) = failed(site, KVPLUG_STRICT_PLUGINS="perhaps")
    assert said.startswith("ConfigError: ") and "allowed is 1 or 0" in said


def test_a_distribution_found_twice_is_one_plugin_and_the_first_on_the_path_is_it(site: Any) -> None:
    site.add("good", pipe("x"), version="2.0")
    site.add("good", pipe("x"), version="1.0", where="older")
    site.add_metadata("kvplug.good", "1.0", "good = kvplug_good.plugin", where="older")  # spelt otherwise
    site.path.append(site.folder / "older")
    found = site.plugin("good")
    assert (found["status"], found["version"]) == ("ok", "2.0")


def test_a_line_that_is_there_twice_counts_once_and_two_for_one_module_are_not_both_loaded(site: Any) -> None:
    site.add("good", pipe("x"))
    lines = ["good = kvplug_good.plugin"] * 2
    site.add_metadata("kvplug-good", "1.0", *lines, "more = kvplug_good.plugin")
    assert (site.plugin("good")["status"], site.plugin("good")["offers"]) == ("ok", ["x"])
    assert "already registered" in site.plugin("more")["reason"]


def test_somebodys_broken_metadata_hides_nobodys_plugin(site: Any) -> None:
    (site.add_metadata("damaged", "1.0") / "entry_points.txt").write_bytes(b"[kvplug]\n\xff\xfe = \xff")
    site.add("good", pipe("x"))
    assert site.plugin("good")["status"] == "ok"


def test_no_two_threads_parse_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11 that is a SystemError now and then, and a plugin of the user's counts as broken."""
    inside, found = [], []

    def slow(source: str) -> ast.Module:
        inside.append(source)
        time.sleep(0.02)
        found.append(len(inside))
        inside.pop()
        return ast.parse(source)

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
