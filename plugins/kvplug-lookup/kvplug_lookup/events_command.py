"""``kvplug events``: prints what a publisher says of its blocks."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from kvplug import KvplugError, TimeoutError


@click.command()
@click.argument("address")
@click.option("--replay", metavar="ADDRESS", help="Ask here for batches that were published before, first.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many events.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    help="Stop, with exit code 1, when nothing came for so many seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with every field.")
def events(
    address: str, replay: str | None, count: int | None, timeout_s: float | None, as_json: bool
) -> None:
    """Print events about cached blocks that an engine publishes at ADDRESS, such as tcp://127.0.0.1:5557.

    The engine publishes where its option `events` says (connector "lookup"); vLLM's own publisher has the
    same form. A missing number between two batches is reported: use --replay."""
    printed = 0
    for batch in _batches(address, replay, timeout_s):
        for event in batch["events"]:
            click.echo(
                json.dumps({**_readable(event), "seq": batch["seq"]}) if as_json else _line(batch, event)
            )
            sys.stdout.flush()
            printed += 1
            if count is not None and printed >= count:
                return


def _batches(address: str, replay: str | None, timeout_s: float | None) -> Iterator[dict[str, Any]]:
    import zmq

    context = zmq.Context()
    sockets = contextlib.ExitStack()
    try:
        subscribed = sockets.enter_context(context.socket(zmq.SUB))
        subscribed.subscribe(b"")
        subscribed.connect(address)
        last = -1
        for seq, payload in _replayed(context, sockets, replay, timeout_s) if replay is not None else ():
            last = seq
            yield _decoded(seq, payload)
        while True:
            if not subscribed.poll(None if timeout_s is None else int(timeout_s * 1000)):
                raise TimeoutError(f"nothing was published at {address} for {timeout_s:g} s")
            _, number, payload = subscribed.recv_multipart()
            seq = int.from_bytes(number, "big", signed=True)
            if seq <= last:
                continue
            if last >= 0 and seq != last + 1:
                click.echo(f"kvplug: {seq - last - 1} batches before number {seq} were missed", err=True)
            last = seq
            yield _decoded(seq, payload)
    except zmq.ZMQError as e:
        raise KvplugError(f"{address}: {e}") from e
    finally:
        sockets.close()
        context.destroy(linger=0)


def _replayed(
    context: Any, sockets: contextlib.ExitStack, address: str, timeout_s: float | None
) -> Iterator[tuple[int, bytes]]:
    import zmq

    from kvplug_lookup.connector.publisher import END_SEQ

    asking = sockets.enter_context(context.socket(zmq.DEALER))
    asking.connect(address)
    asking.send_multipart((b"", (0).to_bytes(8, "big")))
    while True:
        if not asking.poll(10_000 if timeout_s is None else int(timeout_s * 1000)):
            raise TimeoutError(f"nothing answers at the replay address {address}")
        parts = asking.recv_multipart()
        number, payload = parts[-2], parts[-1]
        if number == END_SEQ:
            return
        yield int.from_bytes(number, "big", signed=True), payload


def _decoded(seq: int, payload: bytes) -> dict[str, Any]:
    try:
        published, found, *_ = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError) as e:
        raise KvplugError(f"batch {seq} is no batch of events: {e}") from e
    return {"seq": seq, "time": published, "events": found}


def _readable(event: Any) -> dict[str, Any]:
    """The event with its hashes in hexadecimal digits."""
    return {name: _hex(value) for name, value in dict(event).items()}


def _hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_hex(each) for each in value] if isinstance(value, list) else value


def _line(batch: dict[str, Any], event: Any) -> str:
    hashes = [
        _hex(each)[:12] if isinstance(each, bytes) else str(each) for each in event.get("block_hashes", ())
    ]
    where = " ".join(str(event[name]) for name in ("medium", "ownership") if event.get(name))
    shown = ", ".join(hashes[:4]) + (f" and {len(hashes) - 4} more" if len(hashes) > 4 else "")
    clock = time.strftime("%H:%M:%S", time.localtime(batch["time"]))
    tokens = f", {len(event['token_ids'])} tokens" if "token_ids" in event else ""
    return f"{clock} {batch['seq']:6d} {event['type']:16} {where:12} {shown}{tokens}".rstrip()
