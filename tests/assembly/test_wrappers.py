"""Transports that wrap another one: how a config names both, and that the peer meets the inner one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplug import Config, ConfigError, PluginError, Registry, build_queue
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.transport import Capabilities, TransportSpec, hookimpl
from kvplug.transport.spec import Kind
from kvplug_testing.sources import module_at

AROUND = {"mark": "x"}
relay = module_at(str(Path(__file__).parents[1] / "lab/subjects/relay.py"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    registry = Registry.from_env()
    registry.register(relay.plugin, name="relay")
    return registry


def config(around: dict[str, Any] | None, **more: Any) -> Config:
    options = {} if around is None else {"around": around}
    return Config.from_dict({"role": "both", "options": options, **more})


def faults_of(config: Config, registry: Registry, *keys: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        ResolvedConfig(config, registry).check(keys=keys)
    return caught.value.faults


@pytest.mark.parametrize(
    ("key", "inner", "said"),
    [
        ("transport", "nothing-such", "no transport named 'nothing-such'"),
        ("transport", "around", "'around' itself wraps another transport"),
        ("queue", "realy", "no message queue named 'realy'; did you mean 'relay'?"),
        ("queue", "cpu", "no message queue named 'cpu'"),
        ("queue", "around", "'around' itself wraps another transport"),
    ],
)
def test_what_cannot_be_inside_is_named_when_the_config_is_checked(
    registry: Registry, key: str, inner: str, said: str
) -> None:
    (fault,) = faults_of(config({**AROUND, "inner": inner}, **{key: "around"}), registry, key)
    assert fault.startswith(f"options.around.inner: {said}")


def test_faults_of_the_wrapper_and_of_what_it_wraps_are_listed_together(registry: Registry) -> None:
    given = {"queue": "around", "options": {"around": {"inner": "relay"}, "relay": {"spin": 1}}}
    faults = faults_of(Config.from_dict(given), registry, "queue")
    assert any(fault.startswith("options.around.mark: must be given") for fault in faults)
    assert "options.relay: the queue 'relay' takes no options" in faults


@pytest.mark.parametrize("inner", ["memory", "auto"])
def test_an_end_with_a_wrapper_offers_its_peer_the_inner_transport(registry: Registry, inner: str) -> None:
    resolved = ResolvedConfig(config({**AROUND, "inner": inner}, transport="around"), registry)
    assert resolved.requested_transport == inner
    assert resolved.offers() == ResolvedConfig(config(None), registry).offers()


# -- the inner queue -------------------------------------------------------------------------------


class Offers:
    """A plugin with two queues. "auto" would select the second, if it did not wrap another."""

    @staticmethod
    @hookimpl
    def kvplug_transports() -> list[TransportSpec]:
        able = Capabilities(
            authenticated=False, cross_host=True, cost=Capabilities.Cost(latency_us=50.0, gb_per_s=1.0)
        )
        fast = Capabilities(cost=Capabilities.Cost(latency_us=1.0, gb_per_s=1.0))
        inner, around = "kvplug_relay.queue:RelayEndpoint", "kvplug_lab.around:around"
        return [
            TransportSpec(kind=Kind.QUEUE, name="trusting", factory=inner, capabilities=able),
            TransportSpec(kind=Kind.QUEUE, name="fast", factory=around, capabilities=fast, wraps=True),
        ]


@pytest.fixture
def few() -> Registry:
    """Without what else is installed, which "auto" may prefer."""
    every = {plugin.name for plugin in Registry.from_env().plugins} - {"core", "testing", "lab"}
    registry = Registry.from_env({"KVPLUG_DISABLE_PLUGINS": ",".join(every)})
    registry.register(Offers, name="offers")
    return registry


def test_the_inner_queue_is_made_with_the_arguments_of_the_wrapper(few: Registry) -> None:
    few.register(relay.plugin, name="relay")
    for inner in ("relay", "auto"):
        given = config({**AROUND, "inner": inner}, queue="around")
        endpoint = build_queue(given, n_reader=2, max_chunks=5, registry=few)
        assert isinstance(endpoint, relay.RelayEndpoint)
        assert (endpoint.context.n_reader, endpoint.context.max_chunks) == (2, 5)
    assert isinstance(build_queue(config(None, queue="auto"), registry=few), relay.RelayEndpoint)


@pytest.mark.parametrize(
    "given",
    [
        {"queue": "trusting"},
        {"queue": "auto"},
        *(
            {"queue": "around", "options": {"around": {**AROUND, "inner": inner}}}
            for inner in ("trusting", "auto")
        ),
    ],
)
def test_a_queue_that_other_hosts_reach_must_authenticate(few: Registry, given: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="its data plane is not authenticated"):
        build_queue(Config.from_dict({**given, "host": "192.0.2.7"}), registry=few)
    build_queue(Config.from_dict(given), registry=few)
