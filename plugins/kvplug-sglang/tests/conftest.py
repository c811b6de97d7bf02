"""Fixtures for kvplug inside SGLang. Without SGLang these tests are not collected; `tox run -e sglang`
installs it, with what it needs to run on a CPU."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of two small models of one shape and different random weights.

    They answer in milliseconds, and whatever is wrong with their KV shows: what they say depends on every
    token, and means nothing.
    """
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.convert import converted
    from vllm_models import write_random_llama

    like = str(converted(find_gguf()))
    made = [tmp_path_factory.mktemp(f"llama{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        write_random_llama(folder, like=like, seed=seed)
    return str(made[0]), str(made[1])
