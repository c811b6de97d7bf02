"""Stores "nixl", and pages for them."""

from __future__ import annotations

from typing import Any

from kvplug import Config, build_store
from kvplug.transport import Store
from kvplug_lab.named_pages import NamedPages

PAGE = 40_000
PAGES = NamedPages(PAGE)
request, put, got = PAGES.request, PAGES.put, PAGES.got


def opened(**options: Any) -> Store:
    """A store with these options. The first use in a process loads NIXL, in the time of that request."""
    config = {"stores": ["nixl"], "timeout_s": 30, "options": {"nixl": options}}
    return build_store(Config.from_dict(config))


def held(store: Store, *names: str) -> list[str]:
    return [str(each) for each in store.submit_lookup(request(store, *names).keys).wait(30)]
