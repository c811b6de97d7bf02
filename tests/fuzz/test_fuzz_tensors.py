"""Mutated bytes of peers into what reads them, in the plugins."""

from __future__ import annotations

import fuzz_targets
import fuzzing
import pytest

SECONDS = 10.0


@pytest.mark.full
@pytest.mark.parametrize("name", fuzz_targets.PLUGINS)
def test_whatever_the_bytes_are_the_error_is_kvplugs(name: str) -> None:
    target, seeds = fuzz_targets.PLUGINS[name]
    for _ in fuzzing.fuzz(name, target, seeds, seconds=SECONDS, seed=1):
        pass


@pytest.mark.parametrize("name", fuzz_targets.PLUGINS)
def test_what_a_target_begins_with_is_right_and_what_was_new_or_a_fault_once_is_read(name: str) -> None:
    target, seeds = fuzz_targets.PLUGINS[name]
    for seed in seeds:
        target(seed)
    for data in (*fuzzing.kept(fuzzing.CORPUS, name), *fuzzing.kept(fuzzing.FOUND, name)):
        fuzzing.call(name, target, data)
