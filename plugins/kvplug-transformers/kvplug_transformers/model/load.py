"""Loads a Hugging Face folder: the model, its tokenizer and its chat template."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
from transformers import PreTrainedModel

from kvplug import UnsupportedError


@attrs.frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model with its tokenizer and chat template."""

    model: PreTrainedModel
    """On the device ``meta`` if it was loaded without weights."""
    tokenizer: Any
    stop_token_ids: tuple[int, ...]

    def encode(self, prompt: str) -> list[int]:
        """Token ids of the prompt, as one chat message if the model has a chat template."""
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(prompt)["input_ids"])
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def decode(self, token_ids: list[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def load(folder: Path, *, weights: bool = True) -> LoadedModel:
    """Load only from the folder, in float32; nothing is downloaded and no code from the folder runs.

    Without ``weights`` the model has only its modules, for a process whose workers compute.

    Raises:
        UnsupportedError: it holds no causal language model, or one that requires its own code.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # Explicit, since transformers would ask on stdin otherwise.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        if "trust_remote_code" in str(e):
            raise UnsupportedError(f"the model in {folder} needs its own code, which is never run") from e
        raise UnsupportedError(f"{folder} holds no model that transformers knows: {_first_line(e)}") from e
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{folder} holds an encoder-decoder model ({config.model_type}), whose cache is not keys and"
            " values per layer; this engine takes causal language models"
        )
    try:
        if weights:
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, trust_remote_code=False
            )
        else:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            if (folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # a broken file raises various errors of transformers or safetensors
        raise UnsupportedError(
            f"the model in {folder} ({config.model_type}) cannot be loaded: {_first_line(e)}"
        ) from e
    stop = model.generation_config.eos_token_id
    stop_ids = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, stop_token_ids=stop_ids)


def _first_line(error: Exception) -> str:
    """The beginning of another library's error message, on one line."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(" ".join(lines).split())[:300] if lines[0].rstrip().endswith(":") else lines[0]
