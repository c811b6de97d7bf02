"""The program ``kvplug`` itself: its commands, those of plugins, and how it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvplug

COMMANDS = """\
from kvplug.engine import CommandSpec
from kvplug.transport import hookimpl
KVPLUG_API = (1, 0)
@hookimpl
def kvplug_commands():
    return [CommandSpec(name="{name}", target="kvplug_birds.heavy:coo", summary="Of another plugin")]
"""


def test_the_version_says_what_bug_reports_need_and_without_arguments_there_is_help(site: Any) -> None:
    done = site.kvplug("--version")
    assert done.stdout.startswith(f"kvplug {kvplug.__version__}, plugin API 1.0, Python 3.")
    assert done.returncode == 0
    done = site.kvplug()
    assert "Usage: kvplug" in done.stdout + done.stderr


def test_help_shows_plugins_commands_without_importing_them(birds: Any) -> None:
    text = birds.kvplug("--help").stdout
    assert "Make a sound: coo" in text
    assert "List plugins, what they offer" in text
    assert not (birds.package / "heavy.py.loaded").exists()


def test_an_unknown_command_lists_the_known_ones_and_what_did_not_load(birds: Any) -> None:
    birds.add_bad()
    done = birds.kvplug("cofnig")
    assert done.returncode == 2
    assert "no command named 'cofnig'; did you mean 'config'?" in done.stderr
    assert "known: bench, check, config, coo, " in done.stderr
    assert "broken: bad (kvplug-bad 1.0)" in done.stderr


def test_a_command_of_two_plugins_is_refused_and_none_takes_one_of_the_core(birds: Any) -> None:
    birds.add("more", COMMANDS.format(name="coo"))
    birds.add("thief", COMMANDS.format(name="list"))
    done = birds.kvplug("coo")
    assert done.returncode == 1
    assert "the command 'coo' is offered by" in done.stderr
    shown = birds.kvplug("--help").stdout
    assert "Make a sound: coo" not in shown and "Of another plugin" not in shown
    assert "carrier-pigeon" in birds.kvplug("list").stdout


def test_a_file_in_place_of_a_store_is_refused_with_the_option_that_takes_it(birds: Any) -> None:
    done = birds.kvplug("store", "serve", "kv.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "use --config kv.toml" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["odd"], {}, "is not a click command"),
        (["lost"], {}, "cannot load kvplug_birds.heavy:lost: AttributeError"),
        (["fail"], {}, "kvplug: the cat came\n"),
        (["list"], {"KVPLUG_STRICT_PLUGINS": "1"}, "KVPLUG_STRICT_PLUGINS is set"),
        (["list"], {"KVPLUG_LOG": "loud"}, "KVPLUG_LOG: 'loud' was given; allowed is one of debug, info, "),
    ],
    ids=str,
)
def test_an_error_is_one_message(birds: Any, arguments: list[str], environment: Any, said: str) -> None:
    birds.add_bad()
    done = birds.kvplug(*arguments, **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_log_of_json_has_the_error_that_ends_the_program_too(birds: Any) -> None:
    birds.add_bad()
    done = birds.kvplug("fail", KVPLUG_LOG="debug,json")
    *before, last = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, last["level"], last["message"]) == (1, "ERROR", "the cat came")
    assert any("bad" in each["message"] for each in before), "the plugin that did not load"
