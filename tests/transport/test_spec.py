"""Specs: an error names the misspelt value, its spec, its plugin, and the nearest known value."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvplug import PluginError
from kvplug.engine import CommandSpec, ConnectorSpec
from kvplug.errors import PluginLoadError
from kvplug.transport import TransportSpec
from kvplug.transport.spec import Kind

KINDS = "allowed is pipe, queue, lookup_buffer or communicator"


@pytest.mark.parametrize(
    ("given", "hint"),
    [("pip", "; did you mean 'pipe'?"), ("lookup-buffer", "; did you mean 'lookup_buffer'?"), (7, "")],
)
def test_the_error_for_an_unknown_kind_has_the_list_and_the_nearest(given: Any, hint: str) -> None:
    with pytest.raises(PluginError) as caught:
        TransportSpec(kind=given, name="mine", factory="a:b")
    assert str(caught.value) == f"kind: {given!r} was given; {KINDS}{hint}"


class Endpoint:
    """Something of a module that can be called."""


def describe() -> None:
    """Something that is no attrs class."""


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("spec_subject")
    vars(found).update(MineEndpoint=Endpoint, describe=describe, seven=7)
    monkeypatch.setitem(sys.modules, "spec_subject", found)


def pipe(**more: Any) -> TransportSpec:
    return TransportSpec(
        **{"kind": Kind.PIPE, "name": "mine", "factory": "spec_subject:MineEndpoint", **more}
    )


MISSPELT = "spec_subject:MineEndpont"
CANNOT = f"cannot load {MISSPELT}: AttributeError: "
MEANT = "; did you mean 'MineEndpoint'?"


def load(spec: Any, loader: str) -> str:
    with pytest.raises(PluginLoadError) as caught:
        getattr(spec, loader)()
    assert MISSPELT not in str(caught.value) or isinstance(caught.value.__cause__, AttributeError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "loader", "what"),
    [
        (pipe(factory=MISSPELT), "load_factory", "the factory of the pipe 'mine'"),
        (pipe(options=MISSPELT), "load_options", "the options of the pipe 'mine'"),
        (
            ConnectorSpec(name="relay", factory="a:b", worker_factory=MISSPELT),
            "load_worker_factory",
            "the worker factory of the connector 'relay'",
        ),
        (CommandSpec(name="coo", target=MISSPELT), "load", "the target of the command 'coo'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_for_a_misspelt_target_names_it_and_the_nearest(spec: Any, loader: str, what: str) -> None:
    text = load(spec, loader)
    assert text.startswith(f"{what}: {CANNOT}")
    assert text.endswith(MEANT)


WRONG = {
    "is not callable": (pipe(factory="spec_subject:seven"), "load_factory", "factory"),
    "is not an attrs class": (pipe(options="spec_subject:describe"), "load_options", "options"),
}


@pytest.mark.parametrize("why", WRONG)
def test_the_error_for_a_target_of_the_wrong_sort_names_its_sort(why: str) -> None:
    spec, loader, what = WRONG[why]
    target = getattr(spec, what)
    assert load(spec, loader) == f"the {what} of the pipe 'mine': {target} {why}"


def test_a_misspelt_probe_is_a_reason_with_the_nearest() -> None:
    probe = pipe(probe="spec_subject:descrbe").run_probe()
    assert not probe.viable
    assert probe.reason.startswith(
        "the probe of the pipe 'mine': cannot load spec_subject:descrbe: AttributeError"
    )
    assert probe.reason.endswith("; did you mean 'describe'?")


def test_what_is_made_for_tests_is_never_taken_by_auto() -> None:
    made: dict[str, Any] = {"kind": Kind.PIPE, "name": "fake", "factory": "a:B"}
    assert TransportSpec(**made).auto
    assert not TransportSpec(**made, for_tests=True).auto
    with pytest.raises(PluginError, match="the pipe 'fake' is made for tests, so 'auto' cannot select it"):
        TransportSpec(**made, for_tests=True, auto=True)
