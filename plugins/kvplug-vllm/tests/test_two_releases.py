"""Prefill in one release of vLLM, decode in another: what counts is that their blocks have the same format.

    tox run -e vllm -- plugins/kvplug-vllm/tests/test_two_releases.py --other-vllm FOLDER

The folder is one into which ``.ci/vllm_cpu.py --target FOLDER VERSION`` has put another release.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import vllm

pytestmark = pytest.mark.timeout(1200)

HERE = Path(__file__).parent
VERSION = f"{HERE}/inside.py:version"
SMALL = {"block_size": 32}


@pytest.fixture(scope="module")
def other(pytestconfig: pytest.Config) -> dict[str, str]:
    """The environment of an engine of the other release."""
    folder = pytestconfig.getoption("other_vllm")
    if not folder:
        pytest.skip("no other release of vLLM is given (--other-vllm FOLDER)")
    assert (Path(folder) / "vllm").is_dir(), f"{folder} has no vLLM"
    return {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize("old_role", ["kv_producer", "kv_consumer"])
def test_tokens_are_those_of_one_engine_alone(
    old_role: str, other: dict[str, str], start: Any, config_for: Any, prompts: Any, alone: Any, port: int
) -> None:
    is_old_prefill = old_role == "kv_producer"
    with (
        start(config_for("kv_producer", port), env=other if is_old_prefill else {}, **SMALL) as prefill,
        start(config_for("kv_consumer", port), env={} if is_old_prefill else other, **SMALL) as decode,
    ):
        old, new = (prefill, decode) if is_old_prefill else (decode, prefill)
        assert new.ask("call", where=VERSION) == vllm.__version__ != old.ask("call", where=VERSION)
        for length, prompt in prompts.items():
            assert prefill.one(prompt, max_tokens=1).tokens == alone[length][:1]
            answer = decode.one(prompt)
            assert answer.num_cached == (length - 1) // 32 * 32 > 0
            assert answer.tokens == alone[length]
