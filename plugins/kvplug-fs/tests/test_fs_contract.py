"""The store "fs" keeps the laws; what its plugin says of itself."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from kvplug import ConfigError, Registry
from kvplug.transport.spec import Kind
from kvplug_testing import StoreContract, check_plugin


class TestFs(StoreContract):
    store = "fs"


@pytest.mark.slow  # of the disk: a virtual one may take a second for each page
class TestFsWaitsForTheDisk(StoreContract):
    store = "fs"
    options = MappingProxyType({"touch_s": 0, "sync": True, "threads": 1})
    use_granularity_s = 0.02


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("fs") == ()


def test_its_pages_outlive_processes_and_reach_other_hosts() -> None:
    spec = Registry.from_env().get(Kind.STORE, "fs")
    assert spec.persistent
    assert spec.cross_host


def test_a_folder_must_be_named() -> None:
    from kvplug import Config, build_store

    with pytest.raises(ConfigError, match=r"options\.fs\.path: must be given"):
        build_store(Config(stores=("fs",)))
