"""At a terminal of 80 columns: every command, every help, and what the shell completes."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import click
import pytest

from kvplug.assembly.doctor.diagnosis import Diagnosis
from kvplug.assembly.doctor.finding import Finding
from kvplug.assembly.state import StoreState
from kvplug.cli.main import program

WIDTH = 80


def commands(command: click.Command, path: tuple[str, ...] = ("kvplug",)) -> Iterator[tuple[str, ...]]:
    """The path of each command, groups included."""
    yield path
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from commands(below, (*path, name))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command prints to a terminal of that width, line by line, without colours."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def run(command: click.Command, *arguments: str) -> list[str]:
        terminal = Terminal()
        with contextlib.redirect_stdout(terminal), contextlib.suppress(SystemExit):
            command.main(args=list(arguments), prog_name="kvplug")
        return click.unstyle(terminal.getvalue()).splitlines()

    return run


def test_every_help_fits_a_terminal(printed: Any) -> None:
    every = list(commands(program))
    assert {("kvplug", "config", "show"), ("kvplug", "list"), ("kvplug", "store", "serve")} <= {*every}
    for path in every:
        lines = printed(program, *path[1:], "--help")
        assert lines and max(map(len, lines)) <= WIDTH, path
        assert not [line for line in lines if line.rstrip().endswith("...") and "[" not in line], path


# -- texts of others -----------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b\u202e\r\x00"
STRANGER = """\
import click
from kvplug import PeerGoneError
from kvplug.engine import CommandSpec, ConnectorSpec
from kvplug.transport import Probe, TransportSpec, hookimpl
EVIL = "\\x1b]0;owned\\x07\\x1b[31m\\x9b\\u202e\\r\\x00"
KVPLUG_API = (1, 0)
HERE = "kvplug_stranger.plugin"

def probe():
    return Probe(viable=False, reason=EVIL)

@click.command()
def shout():
    raise PeerGoneError(EVIL)

@hookimpl
def kvplug_transports():
    return [TransportSpec(kind="pipe", name="wire", factory="a:b", probe=HERE + ":probe")]

@hookimpl
def kvplug_connectors():
    return [ConnectorSpec(name="plug", factory="a:b", worker_factory="a:b", summary=EVIL)]

@hookimpl
def kvplug_commands():
    return [CommandSpec(name="shout", target=HERE + ":shout", summary=EVIL)]
"""
COMMANDS = (
    *(["--help"], ["shout"], ["list"], ["list", "stranger"], ["list", "wire", "plug"]),
    ["explain", "role=both", "connector=plug", "transport=wire"],
    ["config", "check", "evil.toml"],
)


def controls(text: str) -> set[str]:
    return {character for character in text if not character.isprintable()} - {"\n"}


def test_texts_of_plugins_and_files_are_printable_in_every_command(site: Any) -> None:
    site.add("stranger", STRANGER, version=f"1.0{EVIL[:-2]}")
    site.add("broken", f"raise ValueError({EVIL!r})")
    (site.folder / "evil.toml").write_text(f"connector = {json.dumps(EVIL)}\n{json.dumps(EVIL)} = 1\n")
    every = [site.kvplug(*arguments) for arguments in COMMANDS]
    out, err = ("".join(getattr(done, name) for done in every) for name in ("stdout", "stderr"))
    assert not controls(out + err)
    assert out.count("[31m") >= 5 and err.count("[31m") >= 3


def test_texts_of_peers_are_printable_in_every_command(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = StoreState(name=EVIL, medium=EVIL, num_pages=1, used_bytes=2, budget_bytes=3, num_clients=4)
    monkeypatch.setattr("kvplug.cli.store.store_stats", lambda *_: found)
    finding = Finding(topic=EVIL, verdict="problem", what=EVIL, why=(EVIL,), change=EVIL, at="peer")
    monkeypatch.setattr("kvplug.cli.doctor.diagnose", lambda *_, **__: Diagnosis(findings=[finding]))
    for arguments in (("store", "stats", "unix:@kv"), ("doctor", "role=both")):
        lines = printed(program, *arguments)
        assert "[31m" in "".join(lines) and not controls("".join(lines))


# -- completion ------------------------------------------------------------------------------------------


def completed(site: Any, *words: str) -> list[str]:
    """What bash is told when the last of the words is to be completed."""
    done = site.kvplug(
        _KVPLUG_COMPLETE="bash_complete", COMP_WORDS=" ".join(("kvplug", *words)), COMP_CWORD=str(len(words))
    )
    assert done.returncode == 0, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "some", "only"),
    [
        (("co",), {"coo", "config"}, False),
        (("list", "pap"), {"paper"}, True),
        (("list", "--options", "ne"), {"nest"}, True),
        (("store", "serve", ""), {"nest"}, False),
        (("config", "show", "slow"), {"slow_path="}, True),
        (("config", "show", "./a"), {"./a"}, True),
        (("config", "check", "a"), {"a"}, True),  # a file: the shell looks for it
    ],
)
def test_the_shell_completes_commands_options_names_keys_and_files(
    birds: Any, words: tuple[str, ...], some: set[str], only: bool
) -> None:
    found = {*completed(birds, *words)}
    assert found == some if only else found >= some
    assert "carrier-pigeon" not in found, "it is neither a store nor begins so"
    assert not (birds.package / "heavy.py.loaded").exists()
