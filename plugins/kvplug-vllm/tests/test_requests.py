"""vLLM's request in kvplug's words: what its KV is of, and nothing that another's could be taken for."""

from __future__ import annotations

import itertools
import json
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvplug.engine import RequestEnd

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, RequestStatus, StreamingUpdate

    from kvplug_vllm.requests import Requests, end_of, extra_of

pytestmark = pytest.mark.smoke


def request_of(**more: Any) -> Request:
    given = {
        "request_id": "r",
        "prompt_token_ids": [5, 6, 7],
        "sampling_params": SamplingParams(max_tokens=4),
        "pooling_params": None,
    }
    return Request(**{**given, **more})


def media(identifier: str, offset: int) -> Any:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=2, get_num_embeds=lambda: 2)
    )


def test_whatever_decides_the_kv_makes_another_extra():
    embeds = torch.arange(12, dtype=torch.float32).view(3, 4)
    different = [
        request_of(),
        request_of(cache_salt="a"),
        request_of(cache_salt="b"),
        request_of(lora_request=LoRARequest("a", 1, "/no/such/place")),
        request_of(lora_request=LoRARequest("b", 1, "/no/such/place"), cache_salt="a"),
        request_of(mm_features=[media("cat", 0)]),
        request_of(mm_features=[media("dog", 0)]),
        request_of(mm_features=[media("cat", 1)]),
        request_of(mm_features=[media("cat", 0), media("dog", 1)]),
        request_of(prompt_token_ids=None, prompt_embeds=embeds),
        request_of(prompt_token_ids=None, prompt_embeds=embeds + 1),
        request_of(prompt_embeds=embeds, prompt_is_token_ids=[True, False, False]),
        request_of(prompt_embeds=embeds, prompt_is_token_ids=[False, False, True]),
    ]
    extras = [extra_of(request) for request in different]
    assert extras[0] == b""
    for (one, ours), (other, theirs) in itertools.combinations(enumerate(extras), 2):
        assert ours != theirs, (one, other)
    assert extras == [extra_of(request) for request in different]


def test_a_request_is_translated_anew_when_it_has_grown_or_lost_its_blocks():
    requests, theirs = Requests(), request_of()
    first = requests[theirs]
    assert (first.token_ids, first.num_prompt_tokens, first.generation) == ((5, 6, 7), 3, 0)
    assert requests[theirs] is first
    theirs.append_output_token_ids(8)
    grown = requests[theirs]
    assert (grown.token_ids, grown.num_prompt_tokens) == ((5, 6, 7, 8), 3)
    theirs.num_preemptions += 1
    assert requests[theirs].generation == 1
    requests.forget("r")
    assert requests[theirs] is not grown


def adapter_in(folder: Path, weight: float = 1.0) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    save_file({"lora_A": torch.full((4, 4), weight)}, folder / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 16, "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return LoRARequest("mine", 1, str(folder))


def test_an_adapter_is_known_by_its_weights_beside_its_name(tmp_path):
    """Two servers can have two adapters of one name, or one of them the last version of it."""

    def extra(adapter: LoRARequest) -> bytes:
        return extra_of(request_of(lora_request=adapter))

    one = adapter_in(tmp_path / "one")
    before = extra(one)
    assert before == extra(adapter_in(tmp_path / "copy")), "wherever it is kept"
    (tmp_path / "other format").mkdir()
    others = [adapter_in(tmp_path / "other", 2.0), LoRARequest("mine", 1, str(tmp_path / "other format"))]
    assert len({before, *map(extra, others)}) == 3
    later = time.time_ns() + 10**9
    adapter_in(tmp_path / "one", 3.0)
    os.utime(tmp_path / "one" / "adapter_model.safetensors", ns=(later, later))
    assert extra(one) != before, "loaded again, in place"


extend_session = getattr(Scheduler, "_update_request_as_session")  # noqa: B009 - vLLM's


def test_a_session_has_the_media_of_every_turn():
    """vLLM extends a streaming session's request in place: its prompt, and the pictures in it."""
    sessions = [request_of(mm_features=[media("cat", 0)], resumable=True) for _ in range(2)]
    requests = [Requests() for _ in sessions]
    for session, known in zip(sessions, requests, strict=True):
        first = known[session]
        session.append_output_token_ids(8)
        assert known[session].extra == first.extra
    for session, name in zip(sessions, ("dog", "wolf"), strict=True):
        update = StreamingUpdate(
            mm_features=[MultiModalFeatureSpec(None, "image", name, PlaceholderRange(1, 2))],
            prompt_token_ids=[9, 9, 9],
            max_tokens=4,
            arrival_time=0.0,
            sampling_params=session.sampling_params,
        )
        session.num_computed_tokens = 3
        scheduler = SimpleNamespace(hash_block_size=2, log_stats=False)
        extend_session(scheduler, session, update)
    one, other = (known[session] for known, session in zip(requests, sessions, strict=True))
    assert one.token_ids == other.token_ids == (5, 6, 7, 9, 9, 9)
    assert one.extra != other.extra
    assert one.extra == extra_of(sessions[0])


def test_how_a_request_ended():
    ends = {
        RequestEnd.FINISHED: ("STOPPED", "LENGTH_CAPPED", "REPETITION"),
        RequestEnd.ABORTED: ("ABORTED",),
        RequestEnd.FAILED: ("IGNORED", "ERROR"),
    }
    request = request_of()
    for end, statuses in ends.items():
        for status in statuses:
            request.status = RequestStatus[f"FINISHED_{status}"]
            assert end_of(request) is end, status


def test_a_trace_of_the_engine_goes_on_unless_the_request_carries_one_of_its_own():
    headers, ours = {"traceparent": "theirs"}, {"traceparent": "ours"}
    assert Requests()[request_of()].params == {}
    assert Requests()[request_of(trace_headers=headers)].params == headers
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": ours})
    assert Requests()[request_of(trace_headers=headers, sampling_params=sampling)].params == ours
