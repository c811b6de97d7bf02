"""Translates vLLM's requests into kvplug's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug.engine import Request, RequestEnd
from kvplug_vllm.weights import fingerprint_of_adapter

if TYPE_CHECKING:
    from vllm.v1.request import Request as VllmRequest


class Requests:
    """Translates requests, and caches each translation until the request grows or loses its blocks.

    vLLM asks about a waiting request in every step, and a prompt may have a hundred thousand tokens.
    """

    def __init__(self) -> None:
        self._known: dict[str, Request] = {}
        self._live: dict[str, VllmRequest] = {}

    def __getitem__(self, request: VllmRequest) -> Request:
        self._live[request.request_id] = request
        known = self._known.get(request.request_id)
        if (
            known is None
            or len(known.token_ids) != request.num_tokens
            or known.num_prompt_tokens != request.num_prompt_tokens
            or known.generation != request.num_preemptions
        ):
            if known is not None and known.num_prompt_tokens == request.num_prompt_tokens:
                extra = known.extra
            else:  # also if a streaming session continues: it may add media
                extra = extra_of(request)
            known = Request(
                request_id=request.request_id,
                token_ids=tuple(request.all_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                extra=extra,
                generation=request.num_preemptions,
                # vLLM keeps the headers of a trace if it traces itself.
                params={**(request.trace_headers or {}), **(request.kv_transfer_params or {})},
                block_hashes=request.block_hashes,
                adapter=request.lora_request.lora_name if request.lora_request is not None else "",
            )
            self._known[request.request_id] = known
        return known

    def token_ids(self, request_id: str) -> Sequence[int]:
        """A request's tokens so far, without drafts and placeholders of a step planned ahead."""
        token_ids: Sequence[int] = self._live[request_id].all_token_ids
        return token_ids

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._live.pop(request_id, None)


def extra_of(request: VllmRequest) -> bytes:
    """The inputs besides its tokens that a request's KV depends on, as in vLLM's block hashes.

    The adapter, by its name and its weights; every media item with its position; the cache salt; embeddings
    instead of tokens. Empty for a request of tokens only.
    """
    found: dict[str, Any] = {}
    if request.lora_request is not None:
        adapter = request.lora_request
        found["lora"] = (adapter.lora_name, fingerprint_of_adapter(adapter.lora_path))
    if request.mm_features:
        found["media"] = [
            (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
        ]
    if request.cache_salt:
        found["salt"] = request.cache_salt
    if request.prompt_embeds is not None:
        found["embeds"] = _digest_of(request.prompt_embeds)
        if request.prompt_is_token_ids is not None:
            found["embeds at"] = [at for at, is_id in enumerate(request.prompt_is_token_ids) if not is_id]
    return json.dumps(found, sort_keys=True).encode() if found else b""


def _digest_of(tensor: Any) -> str:
    import torch

    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    header = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.blake2b(header + data.tobytes(), digest_size=16).hexdigest()


def end_of(request: VllmRequest) -> RequestEnd:
    """How a request ended."""
    from vllm.v1.request import RequestStatus

    if request.status == RequestStatus.FINISHED_ABORTED:
        return RequestEnd.ABORTED
    if request.status in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED):
        return RequestEnd.FAILED
    return RequestEnd.FINISHED
