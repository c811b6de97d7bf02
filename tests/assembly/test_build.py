"""Names become things: one process, a transport within it, real control channels."""

from __future__ import annotations

import importlib.util
import sys
import threading
from typing import Any

import attrs
import pytest

from kvplug import (
    Config,
    ConfigError,
    ConnectorInfo,
    HandshakeError,
    PluginError,
    Registry,
    build_connector,
    build_lookup,
    build_queue,
    check_config,
    connect_pipe,
    listen_pipe,
)
from kvplug.assembly import builtin
from kvplug.engine import ConnectorSpec, KVCacheConfig, KVLayout, ModelInfo
from kvplug.engine.connector.values import CacheGroup
from kvplug.errors import InsecureAddressError, UnknownConnectorError, UnknownTransportError
from kvplug.transport import Capabilities, Pipe, PipeEndpoint, Probe, TransportSpec, hookimpl
from kvplug.transport.spec import Kind
from kvplug_testing.memory.options import MemoryPipeOptions
from kvplug_testing.memory.pipe import MemoryEndpoint
from kvplug_testing.waits import until

pytestmark = pytest.mark.timeout(30)

# -- a transport within this process, and plugins that offer it --------------------------------------


CONTEXTS: list[Any] = []


class Endpoint(MemoryEndpoint):
    def __init__(self, context: Any) -> None:
        CONTEXTS.append(context)
        super().__init__(context)


def not_viable() -> Probe:
    return Probe(viable=False, reason="the moon is in the way")


class NotAConnector:
    def __init__(self, context: Any) -> None:
        context.peers.serve(lambda link, _: None)


def broken_endpoint(context: Any) -> PipeEndpoint:
    raise ZeroDivisionError("the device has no lanes")


def transport(name: str = "queues", *, gb_per_s: float = 1.0, **more: Any) -> TransportSpec:
    """A pipe within this process."""
    given: dict[str, Any] = {
        "factory": "test_build_parts:Endpoint",
        "options": "kvplug_testing.memory.options:MemoryPipeOptions",
        "capabilities": Capabilities(cost=Capabilities.Cost(latency_us=1.0, gb_per_s=gb_per_s)),
    }
    return TransportSpec(kind=Kind.PIPE, name=name, **given | more)


@pytest.fixture(autouse=True)
def parts_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs hold strings; the strings lead here, under whatever name this file was imported."""
    monkeypatch.setitem(sys.modules, "test_build_parts", sys.modules[__name__])
    CONTEXTS.clear()


def registry_of(*transports: TransportSpec, **more: Any) -> Registry:
    registry = Registry()
    add(registry, "queues", *transports, **more)
    return registry


def add(
    registry: Registry,
    plugin: str,
    *transports: TransportSpec,
    distribution: str = "",
    connectors: bool = False,
    factory: str = "NotAConnector",
) -> None:
    class Plugin:
        @hookimpl
        def kvplug_transports(self) -> list[TransportSpec]:
            return list(transports)

        @hookimpl
        def kvplug_connectors(self) -> list[ConnectorSpec]:
            spec = ConnectorSpec(
                name="lookup",
                factory=f"test_build_parts:{factory}",
                worker_factory="test_build_parts:NotAConnector",
            )
            return [spec] if connectors else []

    registry.register(Plugin(), name=plugin, distribution=distribution)


def config(**more: Any) -> Config:
    return Config.from_dict({"timeout_s": 5, "connect_timeout_s": 5, **more})


CACHE = KVCacheConfig(
    groups=(CacheGroup(layer_names=("0",), layout=KVLayout("KBTHD", {"B": 4, "T": 16, "H": 2, "D": 8})),),
    num_blocks=4,
)
MODEL = ModelInfo(num_layers=1, num_kv_heads=2, head_size=8, dtype="float32")

# -- pipes ---------------------------------------------------------------------------------------


def joined(here: Registry, there: Registry, ours: Config, theirs: Config) -> tuple[Pipe, Pipe]:
    """The two ends of one pipe, made by two configs."""
    with listen_pipe(ours, "unix:", registry=here) as server:
        accepted: list[Pipe] = []
        thread = threading.Thread(target=lambda: accepted.append(server.accept(timeout=5)))
        thread.start()
        try:
            pipe = connect_pipe(theirs, server.contact, registry=there)
        finally:
            thread.join()
    return accepted[0], pipe


def test_options_of_the_config_reach_the_transport_checked_and_converted() -> None:
    options = {"queues": {"eager": "no", "max_in_flight_bytes": "2 KiB"}}
    registry = registry_of(transport())
    joined(registry, registry, config(options=options), config())
    given = {context.options for context in CONTEXTS}
    assert given == {MemoryPipeOptions(eager=False, max_in_flight_bytes=2048), MemoryPipeOptions()}


def test_a_refusal_reaches_both_ends_with_every_reason_and_the_listener_goes_on() -> None:
    blocked = registry_of(transport(probe="test_build_parts:not_viable"))
    able = registry_of(transport())
    with listen_pipe(config(), "unix:", registry=able) as server:
        with pytest.raises(HandshakeError, match="the moon is in the way"):
            connect_pipe(config(), server.contact, registry=blocked)
        with pytest.raises(HandshakeError, match="none can move cpu tensors"):
            connect_pipe(config(), server.contact, registry=Registry())
        connect_pipe(config(), server.contact, registry=able).close()
        server.accept()


@pytest.mark.parametrize("broken_ends", [(True, False), (False, True)])
def test_auto_passes_over_a_transport_that_does_not_load_at_one_end(
    caplog: pytest.LogCaptureFixture, broken_ends: tuple[bool, bool]
) -> None:
    fast = transport("fast", gb_per_s=100.0)
    bad = attrs.evolve(fast, factory="a_module_that_is_not_there:Broken{:d}{:d}".format(*broken_ends))
    whole = registry_of(transport(), fast, distribution="kvplug-whole")
    broken = registry_of(transport(), bad, distribution="kvplug-broken")
    here, there = (broken if is_broken else whole for is_broken in broken_ends)
    for _ in range(2):
        joined(here, there, config(), config())
    assert len(CONTEXTS) == 4
    (warning,) = [message for message in caplog.messages if "skips it" in message]
    for part in (
        "the pipe 'fast' from kvplug-broken is broken",
        "No module named",
        "reinstall",
        "kvplug list",
    ):
        assert part in warning


def test_a_transport_that_cannot_be_made_is_named_at_both_ends_and_passed_over_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fast(**more: Any) -> Registry:
        return registry_of(transport(), transport("fast", gb_per_s=100.0, **more), distribution="kvplug-mine")

    broken, whole = fast(factory="test_build_parts:broken_endpoint"), fast()
    fault = "the pipe 'fast' from kvplug-mine cannot be made: ZeroDivisionError: the device has no lanes"
    soon = config(timeout_s=0.3, transport="fast")
    with listen_pipe(soon, "unix:", registry=broken) as server:
        with pytest.raises(HandshakeError, match=f"it cannot listen on 'fast': {fault}"):
            connect_pipe(config(), server.contact, registry=whole)
        until(lambda: fault in caplog.text, what="the warning at the end that listens")
    with (
        listen_pipe(soon, "unix:", registry=whole) as server,
        pytest.raises(PluginError, match=fault),
    ):
        connect_pipe(config(), server.contact, registry=broken)
    joined(whole, broken, config(), config())
    assert "the pipe 'fast' from kvplug-mine is broken" in caplog.text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, None),
        ({"transport": "blocked"}, "transport blocked: cannot work here: the moon is in the way"),
        ({"device": "cuda:1"}, "queues: moves cpu tensors, but cuda tensors are needed"),
        (
            {"device": "cuda:1", "transport": "queues"},
            "transport queues: moves cpu tensors, but cuda tensors are needed",
        ),
    ],
)
def test_a_config_that_no_peer_can_match_is_warned_of_when_it_listens(
    given: Any, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    here = registry_of(transport(), transport("blocked", probe="test_build_parts:not_viable"))
    missing = ConnectorInfo(config(**given), here).missing_pipe
    with listen_pipe(config(**given), "unix:", registry=here):
        pass
    if why is None:
        assert missing is None and not caplog.text
    else:
        assert missing is not None and why in missing
        assert f"every peer that connects will be refused: {missing}" in caplog.text


def test_where_nothing_of_a_kind_is_installed_the_packages_that_bring_it_are_named() -> None:
    with pytest.raises(PluginError, match=r"no lookup buffer is available:\n.*: pip install kvplug-lookup$"):
        build_lookup(Config(), registry=Registry())
    with pytest.raises(PluginError, match=r"no queue is available:\n.*: pip install kvplug-shm$"):
        build_queue(Config(), registry=Registry())


def test_a_name_with_two_owners_works_once_the_config_names_the_owner() -> None:
    registry = registry_of(transport(), distribution="kvplug-one")
    add(registry, "others", transport(), distribution="kvplug-two")
    here, there = joined(registry, registry_of(transport()), config(transport="kvplug-two:queues"), config())
    here.send_tensor(None).wait(1)
    assert there.recv_tensor() is None


# -- connectors ----------------------------------------------------------------------------------


def built(registry: Registry, side: str = "worker", **more: Any) -> Any:
    build = {key: more.pop(key) for key in ("model", "parallelism") if key in more}
    return build_connector(
        config(**{"role": "producer", **more}),
        side,
        **{"model": MODEL, "cache": CACHE, "registry": registry, "listen": "unix:", **build},
    )


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"role": None}, ConfigError, r"role.*producer.*consumer.*both"),
        ({"connector": "lokup"}, UnknownConnectorError, "no connector named 'lokup'; did you mean 'lookup'"),
        ({"transport": "cpu"}, UnknownTransportError, "queues"),
        ({"tracing": "zipkin"}, ConfigError, "no installed package offers the exporter 'zipkin'"),
        ({"sinks": ["lgo"]}, ConfigError, "no sink named 'lgo'; did you mean 'log'"),
    ],
)
def test_what_is_missing_or_unknown_is_a_fault_that_names_what_there_is(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    registry = registry_of(transport(), connectors=True)
    registry.register(builtin, name="core", distribution="kvplug")
    with pytest.raises(error, match=message):
        built(registry, **given)


@pytest.mark.parametrize("name", ["prometheus", "kvplug:prometheus"])
def test_a_sink_without_its_package_is_a_fault_before_an_engine_loads_its_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "prometheus_client" else find_spec(name)
    )
    registry = registry_of(transport(), connectors=True)
    registry.register(builtin, name="core", distribution="kvplug")
    with pytest.raises(ConfigError, match=r"sinks: prometheus needs .* pip install 'kvplug\[prometheus\]'"):
        check_config(config(role="producer", sinks=[name]), registry)


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_an_address_that_needs_a_secret_is_refused_before_a_connector_is_made(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPLUG_SECRET", raising=False)
    with pytest.raises(InsecureAddressError, match=r"10\.0\.0\.4"):
        built(registry_of(transport(), connectors=True), side, host="10.0.0.4")


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_a_connector_of_the_wrong_class_is_refused_and_its_listener_closed(side: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(PluginError, match=r"which is not a (Scheduler|Worker)Connector"):
        built(registry_of(transport(), connectors=True), side)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float17"}, r"dtype: 'float17' is not a dtype of a KV cache; did you mean 'float16'\?"),
        ({"num_kv_heads": 8}, "num_kv_heads: the model has 8, and the cache's layout has 2; 8 were expected"),
        ({"head_size": 16}, "head_size: the model has 16, and the cache's layout has 8"),
    ],
)
def test_a_model_that_is_not_the_caches_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(registry_of(connectors=True), model=attrs.evolve(MODEL, **given))
