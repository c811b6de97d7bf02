"""``kvplug events``: prints the events that a publisher sends about its blocks."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final

import click
import msgspec

from kvplug import Duration, KvplugError, TimeoutError
from kvplug.transport import Deadline, peer_text

_PATIENCE_S: Final = 2.0
"""How long to wait for a publisher before reporting that it is missing."""
_REPLAY_S: Final = 10.0
_END_OF_9999: Final = 253402214400.0
_TCP = re.compile(r"tcp://([^\s/*]+):(\d{1,5})")


@click.command()
@click.argument("address")
@click.option(
    "--replay", metavar="ADDRESS", help="First ask this address for batches that were published before."
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many events.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Duration(may_be_zero=True),
    help="Stop with exit code 1 when nothing arrives for this long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with every field.")
def events(
    address: str, replay: str | None, count: int | None, timeout_s: float | None, as_json: bool
) -> None:
    """Print events about cached blocks that an engine publishes at ADDRESS: HOST:PORT, such as
    127.0.0.1:5557, or ipc://PATH.

    The option `events` of the connector "lookup" sets the engine's address; vLLM's own publisher uses the
    same format. Missing batches are reported: use --replay. If nothing listens, that is reported, and the
    command waits for a publisher."""
    printed = 0
    for seq, payload in _batches(_checked(address), replay and _checked(replay), timeout_s):
        for line in _lines(seq, payload, as_json):
            click.echo(line)
            sys.stdout.flush()
            printed += 1
            if count is not None and printed >= count:
                return


# -- the publisher -----------------------------------------------------------------------------


def _checked(address: str) -> str:
    """The address as ZeroMQ takes it.

    Raises:
        KvplugError: it is not an address.
    """
    full = address if "://" in address else f"tcp://{address}"
    tcp = _TCP.fullmatch(full)
    if not (full.startswith("ipc://") or (tcp and 0 < int(tcp[2]) < 65536)):
        raise KvplugError(
            f"{address!r} is not an address of a publisher: give HOST:PORT, such as 127.0.0.1:5557, or ipc://PATH"
        )
    return full


def _batches(address: str, replay: str | None, timeout_s: float | None) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each batch."""
    import zmq
    from zmq.utils.monitor import parse_monitor_message

    context = zmq.Context()
    sockets = contextlib.ExitStack()
    try:
        subscribed = sockets.enter_context(context.socket(zmq.SUB))
        subscribed.ipv6 = True
        subscribed.subscribe(b"")
        monitor = sockets.enter_context(context.socket(zmq.PAIR))
        monitor.rcvhwm = 0  # no limit: a full queue would block ZeroMQ's thread, and closing
        subscribed.monitor("inproc://monitor", zmq.EVENT_ALL)
        monitor.connect("inproc://monitor")
        subscribed.connect(address)
        poller = zmq.Poller()
        poller.register(subscribed, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        last = -1
        for last, payload in _replayed(context, sockets, replay, timeout_s) if replay is not None else ():
            yield last, payload
        silence, patience = Deadline.after(timeout_s), Deadline.after(_PATIENCE_S)
        problem, reported = f"nothing listens at {address}", ""
        while True:
            left = silence.remaining()
            ready = dict(poller.poll(1000 * min(patience.remaining() or 1.0, 1.0 if left is None else left)))
            if subscribed in ready:
                seq, payload = _numbered(subscribed.recv_multipart())
                if seq > last:
                    if last >= 0 and seq != last + 1:
                        click.echo(
                            f"kvplug: {seq - last - 1} batches before number {seq} are missing", err=True
                        )
                    last = seq
                    yield seq, payload
                silence = Deadline.after(timeout_s)
            elif monitor in ready:
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                before = problem
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    problem = reported = ""
                elif event == zmq.EVENT_CONNECTED:
                    problem = f"the listener at {address} does not publish events"
                elif event == zmq.EVENT_CLOSED or (event == zmq.EVENT_DISCONNECTED and not problem):
                    problem, last = f"nothing listens at {address}", -1  # the next publisher starts over
                if problem != before:
                    patience = Deadline.after(_PATIENCE_S)
            elif silence.expired:
                raise TimeoutError(problem or f"nothing was published at {address} for {timeout_s:g} s")
            if patience.expired and problem not in ("", reported):
                click.echo(f"kvplug: {problem}; waiting for it", err=True)
                reported = problem
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
    asking.ipv6 = True
    asking.connect(address)
    asking.send_multipart((b"", (0).to_bytes(8, "big")))
    while True:
        if not asking.poll(1000 * (_REPLAY_S if timeout_s is None else timeout_s)):
            raise TimeoutError(f"nothing answers at the replay address {address}")
        parts = asking.recv_multipart()
        if parts[-2:-1] == [END_SEQ]:
            return
        yield _numbered(parts[-3:])


def _numbered(parts: list[bytes]) -> tuple[int, bytes]:
    """The number and the content of a batch."""
    if len(parts) != 3 or len(parts[1]) != 8:
        raise KvplugError(
            f"a message of {len(parts)} parts is not a batch of events, which has three:"
            " a topic, a number of 8 bytes and its content"
        )
    return int.from_bytes(parts[1], "big", signed=True), parts[2]


# -- the form of events ------------------------------------------------------------------------


class _Batch(msgspec.Struct, array_like=True):
    """A batch. Further fields are ignored."""

    time: Annotated[float, msgspec.Meta(ge=0.0, le=_END_OF_9999)]
    events: list[dict[str, Any]]


class _Event(msgspec.Struct):
    """The fields of an event that a line shows; others are ignored."""

    type: str
    block_hashes: list[int | bytes] = []
    token_ids: list[int] = []
    medium: str | None = None
    ownership: str | None = None


def _lines(seq: int, payload: bytes, as_json: bool) -> list[str]:
    """A line for each event of a batch.

    Raises:
        KvplugError: the payload is not a batch of events.
    """
    try:
        batch = msgspec.msgpack.decode(payload, type=_Batch)
        shown = [msgspec.convert(event, _Event, builtin_types=(bytes,)) for event in batch.events]
        if as_json:
            return [json.dumps({**_readable(event), "seq": seq}, default=str) for event in batch.events]
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise KvplugError(f"batch {seq} is not a batch of events: {peer_text(str(e))}") from e
    clock = time.strftime("%H:%M:%S", time.localtime(batch.time))
    return [peer_text(f"{clock} {seq:6d} {_words(event)}", keep_lines=True) for event in shown]


def _readable(value: Any) -> Any:
    """The value with bytes, such as hashes, as hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(_readable(key)): _readable(each) for key, each in value.items()}
    return [_readable(each) for each in value] if isinstance(value, list | tuple) else value


def _words(event: _Event) -> str:
    hashes = [each.hex()[:12] if isinstance(each, bytes) else str(each) for each in event.block_hashes[:4]]
    more = f" and {len(event.block_hashes) - 4} more" if len(event.block_hashes) > 4 else ""
    where = " ".join(peer_text(each, 40) for each in (event.medium, event.ownership) if each)
    tokens = f", {len(event.token_ids)} tokens" if event.token_ids else ""
    return f"{peer_text(event.type, 40):16} {where:12} {', '.join(hashes)}{more}{tokens}".rstrip()
