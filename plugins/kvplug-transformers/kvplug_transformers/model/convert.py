"""From a GGUF file to a folder that transformers loads in a moment. Run as a program: see :func:`main`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvplug_transformers.model.cache import folder_for, make_once


def convert(source: Path, target: Path) -> None:
    """Read ``source``, unpack its weights to float32, save model, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # GGUF blocks kept as they are cannot be saved again; unpacked weights can.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def converted(source: Path) -> Path:
    """The folder with the converted model, made now if need be (15 s for the demo's model)."""
    return make_once(folder_for(source), lambda target: convert(source, target))


def main() -> None:
    """``python -m kvplug_transformers.model.convert FILE``: convert it, print the folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(converted(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
