"""The reference process: the model runs without kvplug, by transformers' own ``generate``.

This program is run by its path and imports nothing of kvplug, not even to share ten lines with the workers:
otherwise its tokens would prove nothing. It reports which modules of kvplug it has imported.
"""

import ctypes
import json
import os
import signal
import sys
import time


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the parent
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(event: str, **facts: object) -> None:
        events.write(json.dumps({"event": event, **facts}) + "\n")

    class Streamer:
        """``generate`` calls it with each token; it reports progress."""

        def put(self, value: object) -> None:
            send("token")

        def end(self) -> None:
            pass

    start = json.loads(sys.stdin.readline())
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(start["threads"])
    model = AutoModelForCausalLM.from_pretrained(start["model"], dtype=torch.float32, trust_remote_code=False)
    model = model.to(start["device"]).eval()
    send("start", is_answer=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "stop":
            break
        ids = torch.tensor([command["ids"]], device=start["device"])
        began = time.perf_counter()
        output = model.generate(
            ids,
            # Explicit, since transformers would mask prompt tokens that happen to equal the pad token.
            attention_mask=torch.ones_like(ids),
            # A new config: greedy, without penalties of the model's own settings.
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=command["max_new_tokens"],
                eos_token_id=command["stop"] or None,
                pad_token_id=0,
            ),
            streamer=Streamer(),
        )
        send(
            "generate",
            is_answer=True,
            ids=output[0, ids.shape[1] :].tolist(),
            seconds=time.perf_counter() - began,
            imported=sorted(name for name in sys.modules if name.split(".")[0].startswith("kvplug")),
        )
    events.close()
    os._exit(0)


if __name__ == "__main__":
    main()
