"""What differs between releases of vLLM, with stand-ins for the releases that are not installed.

That the adapter works in each of them is tested there: `make test-engines` runs all tests in each.
"""

from __future__ import annotations

import inspect
import json
import logging
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug import ConfigError, UnsupportedError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base

    from kvplug_vllm.connector import KvplugConnector
    from kvplug_vllm.releases import base, cache, events, tables

pytestmark = pytest.mark.smoke

NEWEST = json.loads((Path(__file__).parent / "connector_api_0_33.json").read_text(encoding="utf-8"))
"""Methods of 0.33.0's base class: the names of their parameters, without the first."""

# -- the base class -----------------------------------------------------------------------------------


def parameters_of(function: Any) -> list[str]:
    stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    parameters = inspect.signature(function).parameters.values()
    return [stars.get(one.kind, "") + one.name for one in parameters if one.name != "self"]


def module_like(*, lacks: str = "") -> Any:
    """A module like vLLM's ``base`` of 0.33.0, without one of its names."""

    def init(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...

    methods = {name: None for name in NEWEST if name != lacks}
    names = [name for name in vars(vllm_base) if name.startswith("KVConnector") and name != lacks]
    classes = {name: type(name, (), {}) for name in names}
    return SimpleNamespace(
        **classes | {"KVConnectorBase_V1": type("Base", (), {**methods, "__init__": init})}
    )


def test_the_adapter_has_the_signatures_of_0_33():
    base.require(module_like(), "0.33.0")
    assert base.unknown_names(module_like().KVConnectorBase_V1) == []
    for name, parameters in NEWEST.items():
        ours = inspect.getattr_static(KvplugConnector, name, None)
        if name in vars(KvplugConnector) and not isinstance(ours, property):
            assert parameters_of(getattr(KvplugConnector, name)) == parameters, name


def test_the_adapter_has_the_signatures_of_the_installed_release():
    theirs = vllm_base.KVConnectorBase_V1
    for name, ours in vars(KvplugConnector).items():
        if not name.startswith("_") and name in vars(theirs) and not isinstance(ours, property):
            assert parameters_of(getattr(KvplugConnector, name)) == parameters_of(getattr(theirs, name)), name


@pytest.mark.parametrize(
    "name", ["bind_gpu_block_pool", "requires_kv_delivery", "on_new_request", "KVConnectorWorkerMetadata"]
)
def test_a_release_that_lacks_what_the_adapter_needs_is_refused_with_what_was_found(name):
    with pytest.raises(UnsupportedError) as e:
        base.require(module_like(lacks=name), "0.18.1")
    text = str(e.value)
    assert "the connector API of vLLM 0.18.1" in text
    assert name in text
    assert "tested with vLLM 0.27.1, 0.28.0," in text and "install one of them" in text


def test_a_release_with_another_base_class_or_none_is_refused():
    def init(self: Any, vllm_config: Any, role: Any) -> None: ...

    module = module_like()
    module.KVConnectorBase_V1.__init__ = init
    with pytest.raises(UnsupportedError, match=r"but \(vllm_config, role\)"):
        base.require(module, "0.20.0")
    with pytest.raises(UnsupportedError, match="it has no KVConnectorBase_V1"):
        base.require(SimpleNamespace(), "0.8.0")


def test_a_release_that_requires_more_is_refused_and_names_it():
    with pytest.raises(UnsupportedError, match=rf"vLLM {vllm.__version__} requires renew, shrink"):
        base.require_implemented(type("Connector", (), {"__abstractmethods__": {"shrink", "renew"}}))
    base.require_implemented(KvplugConnector)


# -- memory order, where vLLM does not declare it -----------------------------------------------------


def test_where_no_layout_is_declared_the_adapter_requires_the_order_that_it_assumes(monkeypatch):
    monkeypatch.setattr(cache, "declares_layout", lambda: False)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    for axes, name, order in ((None, "HND", "BHTD"), ("BHTKD", "HND", "BHTD"), ("BTHKD", "NHD", "BTHD")):
        assert cache.layout_to_require(axes) == name
        assert cache.order_of(SimpleNamespace(), lambda axes=axes: axes) == order
    with pytest.raises(ConfigError, match=r"'HBTKD', and vLLM has BHTKD, BTHKD"):
        cache.layout_to_require("HBTKD")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    assert cache.order_of(SimpleNamespace(), lambda: None) == "BTHD", "the variable counts, as in vLLM"


def test_all_groups_are_moved_where_vllm_names_none():
    assert cache.groups_of(SimpleNamespace(kv_cache_groups=["a", "b"])) == ["a", "b"]
    assert cache.groups_of(SimpleNamespace(kv_cache_groups=["a", "b"], transfer_groups=["a"])) == ["a"]


# -- block tables -------------------------------------------------------------------------------------


class Scheduled:
    """A scheduler's truth about its block tables, and the plans that say what is new in them."""

    def __init__(self) -> None:
        self.tables: dict[str, list[list[int]]] = {}
        self.preempted: set[str] = set()
        self._random = random.Random(0)
        self._block = 0

    def blocks(self, most: int) -> list[list[int]]:
        """For each of two groups."""
        count = self._random.randint(0, most)
        self._block += count
        ids = list(range(self._block - count, self._block))
        return [ids, [block + 1000 for block in ids]]

    def step(self, number: int) -> Any:
        """A plan: a new request, some that go on, are preempted, come back or have ended."""
        chance, running = self._random.random, list(self.tables)
        finished = {name for name in running if chance() < 0.1}
        preempted = {name for name in running if name not in finished and chance() < 0.2}
        resumed = {name for name in self.preempted if chance() < 0.5}
        self.preempted = (self.preempted | preempted) - resumed
        for name in finished | preempted:
            del self.tables[name]
        more = {name: self.blocks(2) if chance() < 0.7 else None for name in self.tables if chance() < 0.8}
        for name, blocks in more.items():
            for group, new in zip(self.tables[name], blocks or [[], []], strict=True):
                group.extend(new)
        for name in resumed:
            more[name] = self.blocks(4)
            self.tables[name] = [list(group) for group in more[name] or ()]
        self.tables[f"r{number}"] = self.blocks(5)
        new = SimpleNamespace(req_id=f"r{number}", block_ids=tuple(map(list, self.tables[f"r{number}"])))
        return SimpleNamespace(
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(more), new_block_ids=list(more.values()), resumed_req_ids=resumed
            ),
            num_scheduled_tokens=dict.fromkeys([*more, f"r{number}"], 1),
        )


def test_tables_that_vllm_does_not_offer_are_kept():
    scheduled, kept = Scheduled(), tables.KeptTables()
    for number in range(300):
        plan = scheduled.step(number)
        lookup = kept.of(plan)
        for name in plan.num_scheduled_tokens:
            assert lookup(name) == tuple(map(tuple, scheduled.tables[name]))
        for name in {*scheduled.tables, *scheduled.preempted, "unknown"} - set(plan.num_scheduled_tokens):
            with pytest.raises(KeyError, match="not scheduled in this step"):
                lookup(name)
    assert set(kept._tables) == set(scheduled.tables), "and those of requests that ended are forgotten"


def test_a_name_that_ends_and_comes_again_in_one_step_is_another_request():
    kept = tables.KeptTables()
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    for block in (1, 2):
        plan = SimpleNamespace(
            finished_req_ids={"a"},
            preempted_req_ids=None,
            scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([block],))],
            scheduled_cached_reqs=nothing,
            num_scheduled_tokens={"a": 1},
        )
        assert kept.of(plan)("a") == ((block,),)


def test_tables_that_vllm_offers_are_read():
    state = SimpleNamespace(get_block_ids={"a": ([1, 2], [3])}.get)
    lookup = tables.offered_by_method(SimpleNamespace(kv_connector_block_state=state))
    assert lookup("a") == ((1, 2), (3,))
    with pytest.raises(KeyError, match="not scheduled in this step"):
        lookup("b")


# -- events -------------------------------------------------------------------------------------------


def test_an_owner_that_vllms_events_cannot_name_is_logged_once(caplog):
    def without(**fields: Any) -> Any:
        return fields

    class WithOwner:
        __struct_fields__ = ("ownership",)

        def __init__(self, **fields: Any) -> None:
            self.fields = fields

    assert events.event_of(WithOwner, "me", medium="cpu").fields == {"medium": "cpu", "ownership": "me"}
    assert events.event_of(WithOwner, "").fields == {"ownership": None}
    with caplog.at_level(logging.WARNING):
        for owner in ("", "me", "me"):
            assert events.event_of(without, owner, medium="cpu") == {"medium": "cpu"}
    assert [record.getMessage() for record in caplog.records] == [
        "vLLM's without has no field for an owner: events say nothing about theirs"
    ]
