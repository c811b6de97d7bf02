"""Converts a GGUF file into a folder that transformers loads quickly."""

from __future__ import annotations

from pathlib import Path

from kvplug_transformers.model.cache import folder_for, make_once


def convert(source: Path, target: Path) -> None:
    """Read ``source``, unpack its weights to float32, save model, tokenizer and chat template."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers cannot save packed GGUF blocks, only unpacked weights.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        model.save_pretrained(target)
    except SafetensorError as e:  # for example a full disk
        raise OSError(str(e)) from e
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def converted(source: Path) -> Path:
    """The folder with the converted model, converted now if necessary (15 s for the demo's model)."""
    return make_once(folder_for(source), lambda target: convert(source, target))
