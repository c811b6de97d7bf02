"""Mutated bytes of peers into what reads them, in the core and in the plugins that are installed."""

from __future__ import annotations

import fuzz_targets
import fuzzing
import pytest

OF_CORE_S, SECONDS = 3.0, 10.0
"""Of plugins, and of what peers of the core say most: "values" and "handshakes"."""


@pytest.mark.full
@pytest.mark.parametrize("name", fuzz_targets.ALL)
def test_whatever_the_bytes_are_the_error_is_kvplugs(name: str) -> None:
    target, seeds = fuzz_targets.ALL[name]
    is_short = name in fuzz_targets.CORE and name not in ("values", "handshakes")
    for _ in fuzzing.fuzz(name, target, seeds, seconds=OF_CORE_S if is_short else SECONDS, seed=1):
        pass


@pytest.mark.parametrize("name", fuzz_targets.ALL)
def test_what_a_target_begins_with_is_right_and_what_was_new_or_a_fault_once_is_read(name: str) -> None:
    target, seeds = fuzz_targets.ALL[name]
    for seed in seeds:
        target(seed)
    for data in (*fuzzing.kept(fuzzing.CORPUS, name), *fuzzing.kept(fuzzing.FOUND, name)):
        fuzzing.call(name, target, data)
