"""Fingerprints checkpoints, so that engines do not mix the KV of different models with the same shapes.

Reads only the files' headers and some of their bytes, without the safetensors library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

_OF_A_KIND: Final = 256
"""The most tensors whose values are hashed, among those whose names differ only in numbers. The names, dtypes
and shapes of all tensors are hashed.
"""
_SAMPLE_BYTES: Final = 8 << 10
"""How many bytes to hash at the beginning of a tensor, and again from its middle on."""
_MAX_HEADER_BYTES: Final = 100 << 20
"""The limit of the format's own reader."""


class Checkpoint:
    """Finds and fingerprints the weights of a model or an adapter in safetensors files."""

    @staticmethod
    def files(folder: Path, *, consolidated: bool = False) -> tuple[Path, ...]:
        """Return the safetensors files of the model in this folder: those that the index lists, or all
        if there is no index.

        A folder may also contain another copy of the model, an adapter, or files of an older revision.

        Args:
            consolidated: return the files in Mistral's format instead.
        """
        pattern = "consolidated*.safetensors" if consolidated else "*.safetensors"
        index = "consolidated.safetensors.index.json" if consolidated else "model.safetensors.index.json"
        found = tuple(sorted(folder.glob(pattern)))
        try:
            named = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError):  # a model in one file has no index
            return found
        return tuple(file for file in found if file.name in named)

    @staticmethod
    def fingerprint(files: Sequence[Path]) -> str:
        """Hash the name, dtype and shape of every tensor in safetensors files, and some bytes of its values
        (values of only some experts).

        The hash does not depend on the names or number of the files, and differs for different weights. A
        call takes milliseconds, or about a second for hundreds of files with tens of thousands of experts. A
        second call is cheap: it reads the files again only if their times or sizes have changed.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is not a safetensors file.
        """
        try:
            return _hash_of(tuple(files), _stamps(files))
        except (LookupError, TypeError, AttributeError) as e:  # a header is JSON, but malformed
            raise ValueError(f"not safetensors files: {type(e).__name__}: {e}") from e

    @staticmethod
    def adapter_fingerprint(folder: Path) -> str:
        """Fingerprint the LoRA adapter in this folder, in PEFT's format, including its scale.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is malformed.
        """
        file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
        return f"{Checkpoint.fingerprint((file,))} {_scale_of(config, _stamps((config,)))}"


@functools.lru_cache(maxsize=256)
def _scale_of(config: Path, _: tuple[tuple[int, int], ...]) -> str:
    """Return the scale of an adapter from its config."""
    found = json.loads(config.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{config} is not a JSON object")
    return json.dumps([found.get(key) for key in ("r", "lora_alpha", "use_rslora")])


def _stamps(files: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """Return the files' times and sizes, which change when a file is rewritten."""
    stats = (file.stat() for file in files)
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


@functools.lru_cache(maxsize=256)
def _hash_of(files: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> str:
    headers = {file: _header(file) for file in files}
    sampled = set(_sampled(name for header in headers.values() for name in header))
    described = {}
    for file, header in headers.items():
        with file.open("rb") as opened:
            for name, (kind, begin, end) in header.items():
                value = _sample(opened, begin, end) if name in sampled else b""
                described[name] = f"{name} {kind} ".encode() + value
    digest = hashlib.blake2b(b"".join(described[name] for name in sorted(described)), digest_size=16)
    return f"safetensors:{digest.hexdigest()}"


def _sampled(names: Iterable[str]) -> Iterator[str]:
    """Yield all names, but at most :data:`_OF_A_KIND` of each kind, evenly spread."""
    of_a_kind: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        of_a_kind[re.sub(r"\d+", "0", name)].append(name)
    for alike in of_a_kind.values():
        step = max(1, len(alike) / _OF_A_KIND)
        yield from (alike[int(at * step)] for at in range(min(len(alike), _OF_A_KIND)))


def _header(file: Path) -> dict[str, tuple[str, int, int]]:
    """Return the dtype and shape of every tensor, and where its bytes begin and end in the file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is not a safetensors file: its header has {length} bytes")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        found[name] = f"{tensor['dtype']} {tensor['shape']}", 8 + length + begin, 8 + length + end
    return found


def _sample(opened: BinaryIO, begin: int, end: int) -> bytes:
    """Hash the first bytes of a tensor and those from its middle on."""
    hashed = hashlib.blake2b(digest_size=16)
    for at in (begin, (begin + end) // 2):
        opened.seek(at)
        hashed.update(opened.read(max(0, min(_SAMPLE_BYTES, end - at))))
    return hashed.digest()
