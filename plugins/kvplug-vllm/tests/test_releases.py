"""What differs between releases of vLLM, with stand-ins for the releases that are not installed.

That the adapter works in each of them is tested there: `make test-engines` runs all tests in each.
"""

from __future__ import annotations

import inspect
import itertools
import json
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
    from kvplug_vllm.releases import base, cache, tables

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


def test_a_release_that_lacks_what_the_adapter_needs_is_refused_with_what_was_found():
    for name in ("bind_gpu_block_pool", "requires_kv_delivery", "KVConnectorWorkerMetadata"):
        tested = r"tested with vLLM 0\.27\.1, 0\.28\.0, .* install one of them"
        with pytest.raises(UnsupportedError, match=rf"the connector API of vLLM 0\.18\.1.*{name}.*{tested}"):
            base.require(module_like(lacks=name), "0.18.1")

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
    with pytest.raises(ConfigError, match=r"'HBTKD', but vLLM has BHTKD, BTHKD"):
        cache.layout_to_require("HBTKD")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    assert cache.order_of(SimpleNamespace(), lambda: None) == "BTHD", "the variable counts, as in vLLM"


# -- block tables -------------------------------------------------------------------------------------


def test_tables_that_vllm_does_not_offer_are_kept():
    """Requests begin, go on, are preempted, come back and end, as a plan of vLLM's says it."""
    chance, kept = random.Random(0), tables.KeptTables()
    known: dict[str, list[list[int]]] = {}
    preempted: set[str] = set()
    blocks = itertools.count()

    def new_blocks(most: int) -> list[list[int]]:
        """For each of two groups."""
        ids = list(itertools.islice(blocks, chance.randint(0, most)))
        return [ids, [block + 10_000 for block in ids]]

    for number in range(300):
        finished = {name for name in known if chance.random() < 0.1}
        now_preempted = {name for name in known if name not in finished and chance.random() < 0.2}
        resumed = {name for name in preempted if chance.random() < 0.5}
        preempted = (preempted | now_preempted) - resumed
        for name in finished | now_preempted:
            del known[name]
        more = {name: new_blocks(2) if chance.random() < 0.7 else None for name in known}
        for name, new in more.items():
            for group, ids in zip(known[name], new or [[], []], strict=True):
                group.extend(ids)
        for name in resumed:
            more[name] = new_blocks(4)
            known[name] = [list(ids) for ids in more[name] or ()]
        begun = f"r{number}"
        known[begun] = new_blocks(5)
        plan = plan_of(
            finished_req_ids=finished,
            preempted_req_ids=now_preempted,
            scheduled_new_reqs=[SimpleNamespace(req_id=begun, block_ids=tuple(map(list, known[begun])))],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(more), new_block_ids=list(more.values()), resumed_req_ids=resumed
            ),
        )
        lookup = kept.of(plan)
        for name in plan.num_scheduled_tokens:
            assert lookup(name) == tuple(map(tuple, known[name]))
        for name in {*known, *preempted, "unknown"} - set(plan.num_scheduled_tokens):
            with pytest.raises(KeyError, match="not scheduled in this step"):
                lookup(name)
        assert len(kept) == len(known), "those of requests that ended are forgotten"


def plan_of(**fields: Any) -> Any:
    new, cached = fields["scheduled_new_reqs"], fields["scheduled_cached_reqs"]
    scheduled = dict.fromkeys([*cached.req_ids, *(each.req_id for each in new)], 1)
    return SimpleNamespace(**fields, num_scheduled_tokens=scheduled)
