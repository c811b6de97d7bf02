"""Fixtures for kvplug inside LMCache. Without LMCache these tests are not collected; `tox run -e lmcache`
installs it.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["test_*.py"]

os.environ["LMCACHE_DISABLE_BANNER"] = "1"
os.environ["LMCACHE_TRACK_USAGE"] = "false"  # else its server sends figures to its makers

if not collect_ignore_glob:
    with (
        warnings.catch_warnings()
    ):  # each of its modules makes a logger, in a way that OpenTelemetry deprecates
        warnings.simplefilter("ignore")

        import kvplug_lmcache.adapter  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # LMCache, numba and OpenTelemetry warn of what is theirs
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Any]:
    from redis_server import RedisServer

    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def make(stack: ExitStack) -> Callable[..., Any]:
    """``make(stores=[...], ...)``: an adapter, as LMCache makes it of these ``adapter_params``."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    from lmcache_programs import description

    def made(**params: Any) -> Any:
        config = get_l2_adapter_config_class("plugin").from_dict(description(**params))
        adapter = create_l2_adapter(config)
        stack.callback(adapter.close)
        return adapter

    return made
