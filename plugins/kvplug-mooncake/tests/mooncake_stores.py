"""Stores "mooncake" and pages for them, also in processes that tests start."""

from __future__ import annotations

import time
from typing import Any

import psutil

from kvplug import Config, build_store
from kvplug.transport import Store
from kvplug_lab.named_pages import NamedPages, own_store
from kvplug_mooncake.store import MooncakeStore
from kvplug_testing.peers import Parent

PAGES = NamedPages(100_000)
request, put, got = PAGES.request, PAGES.put, PAGES.got


def build(master: str, *, config: dict[str, Any] | None = None, **options: Any) -> Store:
    given = {"mooncake": {"master": master, "timeout_s": 1, **options}}
    return build_store(
        Config.from_dict({"stores": ["mooncake"], "timeout_s": 10, "options": given, **(config or {})})
    )


def inside(store: Any) -> MooncakeStore:
    own = own_store(store)
    assert isinstance(own, MooncakeStore)
    return own


def process_of(store: Store) -> psutil.Process:
    return psutil.Process(inside(store).running().pid)


def die_with_a_store(parent: Parent, address: str) -> None:
    store = build(address)
    assert put(store, "of one that dies") == [None]
    parent.send(process_of(store).pid)
    while True:
        put(store, f"of one that dies {time.monotonic()}")
