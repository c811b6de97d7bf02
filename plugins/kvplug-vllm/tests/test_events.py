"""Events of the connector, decoded by vLLM's own structs, beside those that vLLM publishes itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from kvplug_testing.waits import until
from vllm_engines import transfer_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

pytestmark = pytest.mark.timeout(900)

BLOCK = 32
WAIT_S = 60.0


def replayed(address: str) -> list[Any]:
    """All events that a publisher keeps, asked for as vLLM's subscribers ask."""
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    events: list[Any] = []
    numbers: list[int] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(address)
        asking.send_multipart((b"", (0).to_bytes(8, "big")))
        while True:
            assert asking.poll(int(WAIT_S * 1000)), f"{address} does not answer"
            _, _, number, payload = asking.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                assert numbers == list(range(len(numbers)))
                return events
            numbers.append(int.from_bytes(number, "big"))
            events += decoder.decode(payload).events


def replayed_when(address: str, fits: Callable[[list[Any]], bool]) -> list[Any]:
    events: list[Any] = []

    def have_come() -> bool:
        events[:] = replayed(address)
        return fits(events)

    until(have_come, WAIT_S, f"these events at {address}")
    return events


def stored(events: list[Any]) -> dict[Any, BlockStored]:
    """Single blocks by their hashes."""
    return {
        block_hash: msgspec.structs.replace(
            event,
            block_hashes=[block_hash],
            parent_block_hash=event.block_hashes[at - 1] if at else event.parent_block_hash,
            token_ids=event.token_ids[at * event.block_size : (at + 1) * event.block_size],
        )
        for event in events
        if isinstance(event, BlockStored)
        for at, block_hash in enumerate(event.block_hashes)
    }


def test_blocks_are_published_under_the_hashes_that_vllm_publishes(start, prompts, port, tmp_path):
    ours, theirs = f"ipc://{tmp_path}/ours-replay", f"ipc://{tmp_path}/theirs-replay"
    lookup = {"events": f"ipc://{tmp_path}/ours", "events_replay": ours}
    # Room for 300 tokens and not for 700 more: the first pages are evicted.
    host = {"size": "48 MiB", "segment_bytes": "4 MiB"}
    with start(
        transfer_config("kv_both", port, options={"lookup": lookup, "host": host}),
        block_size=BLOCK,
        events={
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{tmp_path}/theirs",
            "replay_endpoint": theirs,
        },
        env={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    ) as engine:
        engine.one(prompts[300], max_tokens=1)
        num_blocks = 300 // BLOCK
        vllms = stored(replayed_when(theirs, lambda events: len(stored(events)) >= num_blocks))
        found = stored(replayed_when(ours, lambda events: len(stored(events)) >= num_blocks))
        assert found.keys() == vllms.keys()
        for block_hash, block in found.items():
            own = vllms[block_hash]
            assert (block.parent_block_hash, block.token_ids, block.block_size) == (
                own.parent_block_hash,
                own.token_ids,
                own.block_size,
            )
            owner = getattr(block, "ownership", "host")  # which 0.27 and 0.28 do not know
            assert (block.medium, owner) == ("CPU", "host")
        engine.one(prompts[1500], max_tokens=1)
        gone = replayed_when(ours, lambda events: any(isinstance(event, BlockRemoved) for event in events))
        removed = [each for event in gone if isinstance(event, BlockRemoved) for each in event.block_hashes]
        assert removed
        assert removed[0] in found
