from __future__ import annotations

import pytest
import torch

from kvplug import ConfigError, Registry, TimeoutError
from kvplug.config import check_options
from kvplug.transport import Kind, LookupBuffer, LookupContext, LookupStore


@pytest.fixture(scope="module")
def spec():
    return Registry.from_env().get(Kind.LOOKUP_BUFFER, "simple")


@pytest.mark.parametrize(
    ("given", "evicts"), [({}, False), ({"evict": "never"}, False), ({"evict": "oldest"}, True)]
)
def test_what_happens_to_a_full_store_is_an_option(spec, given, evicts):
    options = check_options(spec.load_options(), given)
    key = torch.zeros(1, 1, 1, 100)
    endpoint = spec.load_factory()(LookupContext(options=options, buffer_size=500, timeout_s=1.0))
    store = endpoint.hold()
    store.insert([1], None, key, None, None)
    if evicts:
        store.insert([2], None, key, None, None, timeout=0)
        assert store.match([1]) == 0
    else:
        with pytest.raises(TimeoutError):
            store.insert([2], None, key, None, None, timeout=0)
        assert store.match([1]) == 1
    store.close()


def test_an_entry_past_its_time_goes_when_room_is_needed(spec):
    options = check_options(spec.load_options(), {"ttl_s": "0"})
    store = spec.load_factory()(LookupContext(options=options, buffer_size=20)).hold()
    store.insert([1, 2], None, None, None, None)
    store.insert([3, 4], None, None, None, None, timeout=0)
    assert store.match([1, 2]) == 0
    store.close()


@pytest.mark.parametrize("given", [{"evict": "newest"}, {"ttl_s": -1}, {"evicts": "oldest"}])
def test_options_that_are_wrong_are_refused_with_what_is_allowed(spec, given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        check_options(spec.load_options(), given)


def test_both_ends_are_what_the_core_calls_them(spec, joined):
    endpoint = spec.load_factory()(LookupContext(options=None, buffer_size=1 << 20))
    store = endpoint.hold()
    end = joined.reach(store)
    assert isinstance(store, LookupStore) and isinstance(end, LookupBuffer)
    store.abort()
