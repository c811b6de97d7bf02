"""vLLM: one prompt, over the store that is named."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys

os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
)


def main(model_folder: str, given: str) -> None:
    asked = json.loads(given)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    extra = {
        "connector": "lookup",
        "stores": asked["stores"],
        "options": {**asked["options"], "lookup": {"load_policy": "always"}},
        "host": "127.0.0.1",
        "port": asked["port"],
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
    answer, found = list(output.outputs[0].token_ids), output.num_cached_tokens or 0
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"answer": answer, "found": found, "version": importlib.metadata.version("vllm-cpu")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
