"""The program ``kvplug`` itself: its commands, those of plugins, and how it fails."""

from __future__ import annotations

from typing import Any

import pytest

import kvplug
from kvplug import Registry
from kvplug.cli.main import main

HEADER = """\
from kvplug.engine import CommandSpec
from kvplug.transport import hookimpl
KVPLUG_API = (1, 0)
"""


def commands(**targets: str) -> str:
    specs = ", ".join(
        f"CommandSpec(name={name!r}, target={target!r}, summary='About {name}')"
        for name, target in targets.items()
    )
    return f"{HEADER}\n@hookimpl\ndef kvplug_commands():\n    return [{specs}]\n"


COO = """
import click, os
open(__file__ + ".loaded", "w").close()

@click.command()
@click.argument("what", default="coo")
def coo(what):
    "Make a sound."
    click.echo(what)

@click.command()
def fail():
    from kvplug import PeerGoneError
    raise PeerGoneError("the cat came")

not_a_command = 7
"""


@pytest.fixture
def birds(site: Any) -> Any:
    source = commands(
        coo="kvplug_birds.heavy:coo",
        fail="kvplug_birds.heavy:fail",
        odd="kvplug_birds.heavy:not_a_command",
        lost="kvplug_birds.heavy:missing",
    )
    site.package = site.add("birds", source, files={"heavy.py": COO})
    return site


def test_the_version_says_what_bug_reports_need(site: Any) -> None:
    done = site.kvplug("--version")
    assert done.stdout.startswith(f"kvplug {kvplug.__version__}, plugin API 1.0, Python 3.")
    assert done.returncode == 0


def test_help_shows_plugins_commands_without_importing_them(birds: Any) -> None:
    text = birds.kvplug("--help").stdout
    assert "About coo" in text
    assert "Plugins, what they offer" in text
    assert not (birds.package / "heavy.py.loaded").exists()


def test_a_plugins_command_runs(birds: Any) -> None:
    done = birds.kvplug("coo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "Make a sound." in birds.kvplug("coo", "--help").stdout


def test_an_unknown_command_lists_the_known_ones_and_what_did_not_load(birds: Any) -> None:
    birds.add("bad", HEADER + "import a_module_that_is_not_there")
    done = birds.kvplug("cofnig")
    assert done.returncode == 2
    assert "no command named 'cofnig'; did you mean 'config'?" in done.stderr
    assert "known: bench, check, config, coo, " in done.stderr
    assert "broken: bad (kvplug-bad 1.0)" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo"],
        ["list", "demo"],
        ["list", "--options", "redis"],
        ["explain", "role=both", "stores=redis"],
        ["doctor", "role=both", "stores=redis"],
    ],
)
def test_the_package_of_a_name_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(Registry, "from_env", classmethod(lambda cls: cls()))
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code
    shown = capsys.readouterr()
    package = "kvplug-transformers" if "demo" in arguments else "kvplug-redis"
    assert f"pip install {package}" in shown.out + shown.err
    if "doctor" in arguments:
        assert f"-> pip install {package}\n" in shown.out


def test_a_command_that_two_plugins_bring_is_refused(birds: Any) -> None:
    birds.add("more", commands(coo="kvplug_more.heavy:coo"))
    done = birds.kvplug("coo")
    assert done.returncode == 1
    assert "the command 'coo' is offered by" in done.stderr
    assert "About coo" not in birds.kvplug("--help").stdout


def test_no_plugin_takes_a_command_of_the_core(birds: Any) -> None:
    birds.add("thief", commands(list="kvplug_birds.heavy:coo"))
    assert "About list" not in birds.kvplug("--help").stdout
    assert "NAME" in birds.kvplug("list").stdout


@pytest.mark.parametrize(
    ("name", "part"),
    [("odd", "is not a click command"), ("lost", "cannot load kvplug_birds.heavy:missing: AttributeError")],
)
def test_a_command_that_cannot_be_loaded_is_one_message(birds: Any, name: str, part: str) -> None:
    done = birds.kvplug(name)
    assert done.returncode == 1
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_kvplug_is_one_message_and_a_traceback_on_demand(birds: Any) -> None:
    done = birds.kvplug("fail")
    assert (done.returncode, done.stderr) == (1, "kvplug: the cat came\n")
    assert "Traceback" in birds.kvplug("fail", KVPLUG_DEBUG="1").stderr


def test_the_log_is_shown_on_demand(birds: Any) -> None:
    birds.add("bad", HEADER + "import a_module_that_is_not_there")
    assert "did not load" not in birds.kvplug("list").stderr
    assert (
        "DEBUG kvplug.assembly.registry.registry: plugin bad"
        in birds.kvplug("list", KVPLUG_LOG="debug").stderr
    )
    done = birds.kvplug("list", KVPLUG_LOG="loud")
    assert done.returncode == 1
    assert "KVPLUG_LOG: 'loud' was given; allowed is one of debug, info, warning, error" in done.stderr


def test_strict_mode_is_one_message_too(birds: Any) -> None:
    birds.add("bad", HEADER + "import a_module_that_is_not_there")
    done = birds.kvplug("list", KVPLUG_STRICT_PLUGINS="1")
    assert done.returncode == 1
    assert "KVPLUG_STRICT_PLUGINS is set" in done.stderr
    assert "Traceback" not in done.stderr


def test_called_without_anything_it_shows_its_help(site: Any) -> None:
    done = site.kvplug()
    assert "Usage: kvplug" in done.stdout + done.stderr
