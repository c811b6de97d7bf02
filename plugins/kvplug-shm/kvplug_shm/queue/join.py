"""Join of a reader: it proves itself, names its rank, and receives the ring's memory if it can share it.

    reader                                writer
    queue, rank, terms of watching   ->
                                     <-   which of the ring's readers it is, sizes, agreed terms, and the
                                          memory, over the Unix socket of this host; or why not
    that it is there                 ->
                                     <-   welcome

If the join fails before the last message, the rank is free again. Afterwards the connection of a reader that
shares the memory is only watched; otherwise it carries the messages (:mod:`kvplug_shm.queue.stream`).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Final

import attrs

from kvplug import ConfigError, PeerGoneError
from kvplug.transport import Connection, WireError, peer_text
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.queue.ring_buffer import Sizes

PURPOSE: Final = "queue-shm"
_MOST_WORDS: Final = 600


# -- the reader's side -------------------------------------------------------------------------


def ask(writer: JoiningPeer, queue: str, rank: int, *, shares_memory: bool) -> tuple[int, Sizes]:
    """Ask to be admitted. Returns this reader's index in the ring, and the queue's sizes.

    If it shares the memory, the descriptor is in ``writer.fds``. :func:`confirm` must follow.

    Raises:
        ConfigError: the writer refuses this reader; says why.
        PeerGoneError: the writer is gone; another queue may listen there now.
        TimeoutError, ResourceExhaustedError, WireError: it failed.
    """
    writer.introduce({"queue": queue, "rank": rank})
    answer = writer.receive(int(shares_memory))
    match answer:
        case {"refused": str(why)}:
            raise ConfigError(peer_text(why))
        case {"gone": str(why)}:
            raise PeerGoneError(f"the writer of this queue is gone: {peer_text(why)}")
        case {
            "index": int(index),
            "sizes": [int(n_reader), int(max_chunks), int(max_chunk), int(max_message)],
        } if (
            writer.agrees(answer)
            and 0 <= index < n_reader
            and min(max_chunks, max_chunk, max_message) > 0
            and len(writer.fds) == int(shares_memory)
        ):
            try:
                return index, Sizes(n_reader, max_chunks, max_chunk, max_message)
            except ConfigError as e:
                text = f"{writer.connection.describe} states sizes that no queue has: {e}"
                raise WireError(text) from e
    raise writer.not_understood()


def confirm(writer: JoiningPeer) -> None:
    """Last step: this reader has what it needs.

    Raises:
        TimeoutError, PeerGoneError, WireError, ResourceExhaustedError: the writer did not welcome it.
    """
    writer.send("there")
    writer.expect("welcome")


# -- the writer's side -------------------------------------------------------------------------


def asked(reader: JoiningPeer) -> tuple[str, int]:
    """First step: return the queue and the rank that the reader asks for.

    Raises:
        TimeoutError, PeerGoneError, WireError.
    """
    greeting = reader.receive()
    match greeting:
        case {"queue": str(queue), "rank": int(rank)} if reader.agrees(greeting):
            return queue, rank
    raise reader.not_understood()


def refuse(reader: JoiningPeer, why: str) -> None:
    """Second step, if the reader is refused."""
    reader.send({"refused": why[:_MOST_WORDS]})


def answer_gone(reader: JoiningPeer) -> None:
    """Second step, if the reader asks for a queue that is not here."""
    reader.send({"gone": "another queue listens at its address now"})


def admit(reader: JoiningPeer, index: int, sizes: Sizes, memory: Sequence[int] = ()) -> None:
    """The other steps, if the reader is admitted. Heartbeats may follow.

    ``memory``: the descriptor of the ring's memory, if the reader shares it.

    Raises:
        TimeoutError, PeerGoneError, ResourceExhaustedError, WireError.
    """
    reader.introduce({"index": index, "sizes": list(attrs.astuple(sizes))}, memory)
    reader.expect("there")
    reader.send("welcome")


def hang_up(connection: Connection) -> None:
    """Close the connection, after waking a thread that is inside a call on it."""
    with contextlib.suppress(OSError):
        connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
