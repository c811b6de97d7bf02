"""A man in the middle of proven connections: it carries what two ends say, records it, and may change it.

Both ends prove themselves through it, as they would to an attacker who only passes on what it hears. From
then on it speaks for the end whose stream it changes. Descriptors that are handed over pass too.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Self

import attrs

from kvplug import KvplugError
from kvplug.kit import IDENTITY_SIZE, OPENING_SIZE, PROOF_SIZE, REPLY_SIZE, ListenerContact, parse_contact
from kvplug.transport import BackgroundThread, TcpAddress, UnixAddress
from kvplug_testing.tampering.edits import Edit, StreamEditor, StreamId

PROOF_BYTES: Final = {
    True: OPENING_SIZE + PROOF_SIZE + IDENTITY_SIZE,
    False: 2 * REPLY_SIZE + IDENTITY_SIZE,
}
"""What each end sends before it has proved itself: by whether it dialled."""
_READ: Final = 1 << 18
_MAX_FDS: Final = 16
_INT: Final = array.array("i").itemsize


def addresses_in(text: str) -> dict[str, ListenerContact]:
    """The words of a text that are contacts of kvplug's listeners."""
    found = {}
    for word in text.split(" "):
        with contextlib.suppress(KvplugError):
            if ":" in word:
                found[word] = parse_contact(word)
    return found


def addresses_within(value: Any) -> dict[str, ListenerContact]:
    """The same of every text in a plain value."""
    if isinstance(value, str):
        return addresses_in(value)
    if isinstance(value, Mapping):
        return addresses_within([*value.values()])
    found = {}
    if isinstance(value, list | tuple):
        for item in value:
            found.update(addresses_within(item))
    return found


class Relay:
    """Listens in the place of other listeners: give the two ends :meth:`through`'s contact. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listening: list[tuple[socket.socket, threading.Thread]] = []
        self._conversation = _Conversation(None)
        self._closed = False

    def through(self, text: str) -> str:
        """A contact with each address in it replaced by one of the relay's."""
        for word, contact in addresses_in(text).items():
            text = text.replace(word, self._listen_for(contact))
        return text

    def stand_at(self, address: str, theirs: str) -> None:
        """Listen at a chosen address in the place of the listener at ``theirs``."""
        ours, there = parse_contact(address), parse_contact(theirs)
        self._listen_at(ours.address, there)

    def through_plain(self, value: Any) -> Any:
        """The same for every text in a plain value."""
        if isinstance(value, str):
            return self.through(value)
        if isinstance(value, Mapping):
            return {key: self.through_plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.through_plain(item) for item in value)
        return value

    # -- conversations ---------------------------------------------------------------------------------

    def begin(self, edit: Edit | None = None) -> None:
        """What is said from now on is another conversation, in which ``edit`` is applied."""
        with self._lock:
            before, self._conversation = self._conversation, _Conversation(edit)
        before.close()

    def leave(self) -> None:
        """Stand before none of the listeners that there were."""
        ours, self._listening = self._listening, []
        for listening, _ in ours:
            _hang_up(listening)
            listening.close()
        for _, thread in ours:
            thread.join()

    @property
    def recording(self) -> dict[StreamId, list[bytes]]:
        """What has been said since :meth:`begin`, as it came."""
        return {stream: [*sent] for stream, sent in self._conversation.sent.items()}

    @property
    def descriptors(self) -> list[int]:
        """Copies of the descriptors that were handed over, until the next :meth:`begin`."""
        return [*self._conversation.descriptors]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.begin()
        self.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- connections -----------------------------------------------------------------------------------

    def _listen_for(self, there: ListenerContact) -> str:
        if isinstance(there.address, UnixAddress):
            ours: Any = self._listen_at(
                UnixAddress(f"kvplug-relay-{os.getpid()}-{secrets.token_hex(8)}"), there
            )
        else:
            ours = self._listen_at(TcpAddress("127.0.0.1", 0), there)
        return ListenerContact(ours, there.token).reveal()

    def _listen_at(self, ours: UnixAddress | TcpAddress, there: ListenerContact) -> UnixAddress | TcpAddress:
        if isinstance(ours, UnixAddress):
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(ours.sockaddr)
            listening.listen()
        else:
            listening = socket.create_server((ours.host, ours.port))
            ours = TcpAddress(ours.host, listening.getsockname()[1])
        thread = BackgroundThread(
            self._accept,
            args=(listening, there),
            name="kvplug_testing relay",
            stop=partial(_hang_up, listening),
        )
        self._listening.append((listening, thread))
        thread.start()
        return ours

    def _accept(self, listening: socket.socket, there: ListenerContact) -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            try:
                far = _dial(there)
            except OSError:
                near.close()
                continue
            with self._lock:
                conversation, closed = self._conversation, self._closed
            if closed:
                near.close()
                far.close()
                return
            conversation.carry(near, far)


def _dial(there: ListenerContact) -> socket.socket:
    if isinstance(there.address, UnixAddress):
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(there.address.sockaddr)
        except BaseException:
            far.close()
            raise
        return far
    return socket.create_connection((there.address.host, there.address.port))


class _Conversation:
    """All connections since a :meth:`Relay.begin`."""

    def __init__(self, edit: Edit | None) -> None:
        self._edit = edit
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self.sent: dict[StreamId, list[bytes]] = {}
        self.descriptors: list[int] = []
        self._closed = False

    def carry(self, near: socket.socket, far: socket.socket) -> None:
        with self._lock:
            number = len(self._pairs)
            directions = []
            for forward, source, target in ((True, near, far), (False, far, near)):
                stream = StreamId(number, forward)
                edit = self._edit if self._edit is not None and self._edit.stream == stream else None
                sent = self.sent[stream] = []
                directions.append(_Direction(source, target, forward, edit, sent.append, self._hand_over))
            pair = _Pair(near, far, directions)
            self._pairs.append(pair)
            closed = self._closed
            if not closed:
                pair.start()
        if closed:
            pair.close()

    def _hand_over(self, fds: list[int]) -> None:
        with self._lock:
            if not self._closed:
                self.descriptors += [os.dup(fd) for fd in fds]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pairs = [*self._pairs]
        for pair in pairs:
            pair.close()
        with self._lock:
            fds, self.descriptors = self.descriptors, []
        for fd in fds:
            os.close(fd)


@attrs.define(eq=False)
class _Pair:
    """One connection: the two sockets, and a thread for each direction."""

    near: socket.socket
    far: socket.socket
    directions: list[_Direction]

    def start(self) -> None:
        for direction in self.directions:
            direction.thread.start()

    def close(self) -> None:
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for direction in self.directions:
            if direction.thread.ident is not None:
                direction.thread.join()
        self.near.close()
        self.far.close()


class _Direction:
    """One direction of a connection."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        forward: bool,
        edit: Edit | None,
        record: Callable[[bytes], None],
        hand_over: Callable[[list[int]], None],
    ) -> None:
        self._source = source
        self._target = target
        self._proof = PROOF_BYTES[forward]
        self._editor = StreamEditor(edit)
        self._record = record
        self._hand_over = hand_over
        self._has_fds = source.family == socket.AF_UNIX
        self.thread = BackgroundThread(self._run, name="kvplug_testing relay", stop=self._stop)

    def _run(self) -> None:
        try:
            while not self._editor.is_cut:
                data, fds = self._read()
                try:
                    if not data:
                        break
                    proof, said = data[: self._proof], data[self._proof :]
                    self._proof -= len(proof)
                    if said:
                        self._record(said)
                    self._write(proof + self._editor.feed(said), fds)
                finally:
                    for fd in fds:
                        os.close(fd)
            self._write(self._editor.rest() if not self._editor.is_cut else b"", [])
        except OSError:
            pass  # an end hung up
        for sock in (self._target,) if not self._editor.is_cut else (self._target, self._source):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR if sock is self._target else socket.SHUT_RD)

    def _stop(self) -> None:
        _hang_up(self._source)
        _hang_up(self._target)

    def _read(self) -> tuple[bytes, list[int]]:
        if not self._has_fds:
            return self._source.recv(_READ), []
        room = socket.CMSG_SPACE(_MAX_FDS * _INT)
        data, controls, _, _ = self._source.recvmsg(_READ, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, content in controls:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % _INT])
        if fds:
            self._hand_over(fds.tolist())
        return data, fds.tolist()

    def _write(self, data: bytes, fds: list[int]) -> None:
        if not data:
            return
        controls = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self._target.sendmsg([data], controls)
        if sent < len(data):
            self._target.sendall(data[sent:])


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
