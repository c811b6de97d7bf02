"""A man in the middle of proven connections: it carries what two ends send, records it, and may change it.

Both ends prove themselves through it, as they would through an attacker that only passes on what it receives.
From then on it can send in the name of the end whose stream it changes. Descriptors pass through it, too. It
also takes the place of listeners whose contacts it sees in messages.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Self

from kvplug import KvplugError
from kvplug.kit import IDENTITY_SIZE, OPENING_SIZE, PROOF_SIZE, REPLY_SIZE
from kvplug.transport import Address, BackgroundThread
from kvplug_testing.tampering.lies import Edit, StreamEditor, StreamId, frames_in, with_value

_PROOF_BYTES: Final = {
    True: OPENING_SIZE + PROOF_SIZE + IDENTITY_SIZE,
    False: 2 * REPLY_SIZE + IDENTITY_SIZE,
}
"""What each end sends before it has proved itself: by whether it dialled."""
_READ: Final = 1 << 18
_MAX_FDS: Final = 16


class Relay:
    """Listens in the place of other listeners: give two ends contacts of :meth:`through`. Any thread.

    Args:
        edit: is applied to what they send to each other.
    """

    def __init__(self, edit: Edit | None = None) -> None:
        self.recording: dict[StreamId, list[bytes]] = {}
        """What was sent, as it came."""
        self.descriptors: list[int] = []
        """Copies of the descriptors that were handed over."""
        self._edit = edit
        self._lock = threading.RLock()
        self._contacts: dict[str, str] = {}
        """The relay's own ones, by those in whose place they are."""
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._num_connections = 0
        self._closed = False

    def through(self, value: Any) -> Any:
        """A plain value, in whose texts each contact is replaced by one of the relay's."""
        if isinstance(value, str):
            return " ".join(map(self._through_word, value.split(" ")))
        if isinstance(value, Mapping):
            return {key: self.through(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.through, value))
        return value

    def stand_at(self, address: str, theirs: str) -> None:
        """Listen at a chosen address in the place of the listener at ``theirs``."""
        self._listen(Address.parse_contact(address), Address.parse_contact(theirs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        for sock in self._sockets:
            _hang_up(sock)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        for fd in self.descriptors:
            os.close(fd)

    # -- contacts --------------------------------------------------------------------------------------

    def _through_word(self, word: str) -> str:
        with self._lock, contextlib.suppress(KvplugError):
            if ":" in word and word not in self._contacts.values() and not self._closed:
                if word not in self._contacts:
                    self._contacts[word] = self._stand_before(Address.parse_contact(word))
                return self._contacts[word]
        return word

    def _stand_before(self, there: Address) -> str:
        ours: Any = Address("127.0.0.1", 0)
        if there.is_unix:
            ours = Address(name=f"kvplug-relay-{os.getpid()}-{secrets.token_hex(8)}")
        return str(self._listen(ours, there))

    def _listen(self, ours: Address, there: Address) -> Address:
        if ours.is_unix:
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(ours.sockaddr)
            listening.listen()
        else:
            listening = socket.create_server((ours.host, ours.port))
            ours = Address(ours.host, listening.getsockname()[1])
        self._start(self._accept, listening, there)
        return ours

    def _start(self, run: Callable[..., None], source: socket.socket, *args: Any) -> None:
        """Run it in a thread, until the socket is hung up."""
        thread = BackgroundThread(
            run, args=(source, *args), name="kvplug_testing relay", stop=partial(_hang_up, source)
        )
        with self._lock:
            self._sockets.append(source)
            if not self._closed:
                self._threads.append(thread)
                thread.start()

    # -- connections -----------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket, there: Address) -> None:
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
                number, self._num_connections = self._num_connections, self._num_connections + 1
            self._start(self._pass_on, near, far, StreamId(number, forward=True))
            self._start(self._pass_on, far, near, StreamId(number, forward=False))

    def _pass_on(self, source: socket.socket, target: socket.socket, stream: StreamId) -> None:
        sent = self.recording[stream] = []
        is_changed = self._edit is not None and self._edit.stream == stream
        editor = StreamEditor(self._edit if is_changed else None)
        proof_bytes = _PROOF_BYTES[stream.forward]
        with contextlib.suppress(OSError):  # an end hung up
            while not editor.is_cut:
                data, fds, _, _ = socket.recv_fds(source, _READ, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
                try:
                    if not data:
                        break
                    self.descriptors += [os.dup(fd) for fd in fds]
                    proof, payload = data[:proof_bytes], self._with_own_contacts(data[proof_bytes:])
                    proof_bytes -= len(proof)
                    if payload:
                        sent.append(payload)
                    _write(target, proof + editor.feed(payload), fds)
                finally:
                    for fd in fds:
                        os.close(fd)
            _write(target, editor.rest(), [])
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        if editor.is_cut:
            with contextlib.suppress(OSError):
                source.shutdown(socket.SHUT_RD)

    def _with_own_contacts(self, data: bytes) -> bytes:
        """What was sent, and :meth:`through` for the values in it."""
        for begin, end in reversed([*frames_in(data)]):
            with contextlib.suppress(KvplugError):
                frame = data[begin:end]
                ours = with_value(frame, self.through)
                if ours != with_value(frame, lambda value: value):
                    data = data[:begin] + ours + data[end:]
        return data


def _dial(address: Any) -> socket.socket:
    if not address.is_unix:
        return socket.create_connection((address.host, address.port))
    far = socket.socket(socket.AF_UNIX)
    try:
        far.connect(address.sockaddr)
    except BaseException:
        far.close()
        raise
    return far


def _write(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    if fds and data:
        data = data[socket.send_fds(sock, [data], fds) :]
    sock.sendall(data)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
