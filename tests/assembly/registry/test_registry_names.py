"""Names and what they stand for: plugin objects registered by hand, in this process."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvplug import ConfigError, Registry
from kvplug.assembly.registry.check import name_faults, options_of
from kvplug.assembly.registry.packages import PACKAGES
from kvplug.engine import CommandSpec, ConnectorSpec, SinkSpec
from kvplug.errors import AmbiguousNameError, PluginLoadError, UnknownNameError, UnknownTransportError
from kvplug.transport import TransportSpec, hookimpl
from kvplug.transport.spec import Kind


def transport(name: str, kind: str = "pipe", **more: Any) -> TransportSpec:
    return TransportSpec(kind=Kind(kind), name=name, factory="nowhere.at_all:Endpoint", **more)


def offering(*specs: Any) -> object:
    """A plugin object with the hooks for these specs."""

    def of(cls: type) -> list[Any]:
        return [spec for spec in specs if isinstance(spec, cls)]

    class Plugin:
        @hookimpl
        def kvplug_transports(self) -> list[TransportSpec]:
            return of(TransportSpec)

        @hookimpl
        def kvplug_connectors(self) -> list[ConnectorSpec]:
            return of(ConnectorSpec)

        @hookimpl
        def kvplug_sinks(self) -> list[SinkSpec]:
            return of(SinkSpec)

        @hookimpl
        def kvplug_commands(self) -> list[CommandSpec]:
            return of(CommandSpec)

    return Plugin()


def filled(**plugins: list[Any]) -> Registry:
    """A registry with one plugin for each keyword, each of its own distribution."""
    registry = Registry()
    for name, specs in plugins.items():
        registry.register(offering(*specs), name=name, distribution=f"kvplug-{name}", version="1.0")
    return registry


@pytest.mark.parametrize(
    ("kind", "name", "package"),
    [
        (Kind.CONNECTOR, "lookup", "kvplug-lookup"),
        (Kind.PIPE, "pynccl", "kvplug-pynccl"),
        (Kind.STORE, "kvplug_redis:redis", "kvplug-redis"),
        (Kind.STORE, "other:redis", None),
        (Kind.STORE, "lookup", None),
    ],
)
def test_of_a_known_name_that_is_not_installed_the_package_is_named(
    kind: Kind, name: str, package: str | None
) -> None:
    with pytest.raises(UnknownNameError) as error:
        Registry().get(kind, name)
    assert (f"pip install {package}" if package else "") in str(error.value)
    assert ("pip install" in str(error.value)) == (package is not None)
    if package:
        there = filled(**{package.removeprefix("kvplug-"): []})
        with pytest.raises(UnknownNameError) as error:
            there.get(kind, name)
        assert "pip install" not in str(error.value), "it is installed, and lacks the name"


def test_the_packages_of_names_are_those_of_the_plugins() -> None:
    known = {(kind, name, package) for kind, of in PACKAGES.items() for name, package in of.items()}
    there = {
        (spec.kind, spec.name, plugin.distribution)
        for plugin, spec in Registry.from_env()
        if plugin.distribution.startswith("kvplug-") and not getattr(spec, "for_tests", False)
    }
    installed = {package for _, _, package in there}
    samples = {"kvplug-sample", "kvplug-sqlite"}
    assert {each for each in known if each[2] in installed} == {
        each for each in there if each[2] not in samples
    }


def test_a_name_belongs_to_its_kind_and_every_kind_is_collected() -> None:
    specs = {
        Kind.PIPE: transport("shm"),
        Kind.QUEUE: transport("shm", "queue"),
        Kind.CONNECTOR: ConnectorSpec(name="shm", factory="a:b", worker_factory="a:c"),
        Kind.SINK: SinkSpec(name="shm", factory="a:b"),
        Kind.COMMAND: CommandSpec(name="shm", target="a:b"),
    }
    registry = filled(all=[*specs.values()])
    assert {kind: registry.get(kind, "shm") for kind in specs} == specs
    assert registry.specs(Kind.PIPE) == (specs[Kind.PIPE],)
    assert len(registry.plugins[0].specs) == 5
    with pytest.raises(UnknownTransportError):
        registry.get(Kind.COMMUNICATOR, "shm")


def test_a_second_owner_of_a_name_is_refused_whole() -> None:
    registry = filled(a=[transport("cpu"), transport("own")], b=[transport("cpu")])
    with pytest.raises(AmbiguousNameError) as caught:
        registry.get(Kind.PIPE, "cpu")
    text = str(caught.value)
    assert "kvplug-a 1.0 (plugin a) and kvplug-b 1.0 (plugin b)" in text
    assert "use kvplug-a:cpu or kvplug-b:cpu" in text
    assert [spec.name for spec in registry.specs(Kind.PIPE)] == ["own"]


def test_the_full_name_chooses_between_two_owners_and_may_name_the_only_one() -> None:
    mine, yours, own = transport("cpu", summary="mine"), transport("cpu", summary="yours"), transport("own")
    registry = filled(a=[mine, own], b=[yours])
    assert registry.get(Kind.PIPE, "kvplug-a:cpu") == mine
    assert registry.get(Kind.PIPE, "Kvplug_B:cpu") == yours
    assert registry.get(Kind.PIPE, "kvplug-a:own") == registry.get(Kind.PIPE, "own") == own
    with pytest.raises(UnknownTransportError, match="no transport named 'kvplug-c:cpu'"):
        registry.get(Kind.PIPE, "kvplug-c:cpu")


def test_a_plugin_that_is_refused_leaves_nothing_behind() -> None:
    registry = Registry()
    bad = offering(transport("cpu"), transport("cpu"))
    for _ in range(2):  # the second time pluggy must not say "already registered"
        with pytest.raises(PluginLoadError, match="twice"):
            registry.register(bad, name="bad")
    with pytest.raises(PluginLoadError, match="implements no hook"):
        registry.register(SimpleNamespace(), name="nothing")
    assert registry.plugins == registry.specs(Kind.PIPE) == ()


# -- faults of names and options, all at once ------------------------------------------------------


@attrs.frozen
class PipeOptions:
    lanes: int = 2


@attrs.frozen
class QueueOptions:
    depth: int = 2


def test_things_of_one_name_each_take_their_own_from_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    choices: Any = SimpleNamespace(Pipe=PipeOptions, Queue=QueueOptions)
    monkeypatch.setitem(sys.modules, "light_choices", choices)
    connector = ConnectorSpec(name="cpu", factory="a:b", worker_factory="a:c")
    registry = filled(
        one=[transport("cpu", options="light_choices:Pipe")],
        two=[connector, transport("cpu", "queue", options="light_choices:Queue")],
    )
    assert name_faults(registry, {}, {"cpu": {"lanes": 4, "depth": 1}}) == ()
    faults = name_faults(registry, {}, {"cpu": {"lanes": 4, "dept": 1}})
    assert len(faults) == 3 and all("dept" in fault or "takes no options" in fault for fault in faults)
    assert options_of(registry, connector, {"cpu": {"lanes": 4}}) is None
    with pytest.raises(ConfigError, match="takes no options"):
        options_of(registry, connector, {"cpu": {"lanes": 4, "odd": 1}})
