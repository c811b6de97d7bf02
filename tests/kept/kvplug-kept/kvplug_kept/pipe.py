"""The pipe: a blocking socket, frames of kvplug.net.wire, the turns and deadlines of kvplug."""

import contextlib
import os
import select

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, decode_header, encode_header
from kvplug.net.wire.tensors import copy_into, empty_like_meta, encode_meta, memory_of, meta_of, split_meta
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    ExclusiveUse,
    Listener,
    Pipe,
    PipeEndpoint,
    PipeListener,
    TensorMismatchError,
    Transfer,
    WireError,
    close_after_fork,
    dial,
    watch,
)

PURPOSE = "kvplug-kept pipe"


class Endpoint(PipeEndpoint):
    def __init__(self, context):
        self.context = context

    def listen(self):
        return Waiting(Listener.open("unix:", self.context.credentials, PURPOSE), self.context)

    def connect(self, contact, timeout=DEFAULT_TIMEOUT):
        seconds = Deadline.after(timeout, self.context.timeout_s).remaining()
        return Kept(dial(contact, self.context.credentials, PURPOSE, seconds), self.context)


class Waiting(PipeListener):
    def __init__(self, listener, context):
        self.listener, self.context = listener, context

    @property
    def contact(self):
        return self.listener.contact

    def accept(self, timeout=DEFAULT_TIMEOUT):
        seconds = Deadline.after(timeout, self.context.timeout_s).remaining()
        return Kept(self.listener.accept(seconds), self.context)

    def close(self):
        self.listener.close()


class Kept(Pipe):
    def __init__(self, connection, context):
        self.connection, self.sock = connection, connection.sock
        self.options, self.timeout_s = context.options, context.timeout_s
        self.sending, self.receiving = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self.over = False
        self.pidfd = connection.peer.open_pidfd()
        self.watch = watch(pidfd=self.pidfd, sock=self.sock, on_gone=lambda reason: None)
        close_after_fork(self)

    @property
    def closed(self):
        return self.over

    @property
    def peer(self):
        return self.connection.describe

    def send_tensor(self, tensor, *, timeout=DEFAULT_TIMEOUT):
        deadline = Deadline.after(timeout, self.timeout_s)
        if tensor is None:
            parts = [encode_header(FrameKind.NONE, 0)]
        else:
            meta, data = encode_meta(meta_of(tensor)), memory_of(tensor)
            parts = [encode_header(FrameKind.TENSOR, len(meta) + len(data)), meta, data]
        transfer = Transfer(sum(map(len, parts)))
        with self.sending.taken():
            for part in map(memoryview, parts):
                while part:
                    self.wait(select.POLLOUT, deadline)
                    with self.told():
                        part = part[self.sock.send(part[: self.options.chunk_bytes]) :]
        transfer.finish()
        return transfer

    def recv_tensor(self, out=None, *, timeout=DEFAULT_TIMEOUT):
        deadline = Deadline.after(timeout, self.timeout_s)
        with self.receiving.taken():
            header = decode_header(self.take(HEADER_SIZE, deadline), max_length=1 << 40)
            if header.kind is FrameKind.NONE:
                return None
            if header.kind is not FrameKind.TENSOR:
                raise WireError(f"a pipe has no {header.kind.name} frames")
            meta, flat = split_meta(self.take(header.length, deadline))
            if out is not None and meta_of(out) != meta:
                raise TensorMismatchError(f"{meta} came, and out is {meta_of(out)}")
            tensor = empty_like_meta(meta) if out is None else out
            copy_into(tensor, flat)
            return tensor

    def take(self, nbytes, deadline):
        buffer = bytearray(nbytes)
        rest = memoryview(buffer)
        while rest:
            self.wait(select.POLLIN, deadline)
            with self.told():
                count = self.sock.recv_into(rest)
            if not count:
                raise PeerGoneError(f"{self.peer} is gone")
            rest = rest[count:]
        return buffer

    def wait(self, event, deadline):
        if self.over:
            raise ClosedError(f"the pipe to {self.peer} is closed")
        poll, seconds = select.poll(), deadline.remaining()
        poll.register(self.sock, event)
        if not poll.poll(None if seconds is None else seconds * 1000):
            raise TimeoutError(f"nothing moved between here and {self.peer} in time")

    @contextlib.contextmanager
    def told(self):
        try:
            yield
        except OSError as e:
            raise PeerGoneError(f"{self.peer} is gone: {e}") from e

    def close(self, timeout=DEFAULT_TIMEOUT):
        self.abort()

    def abort(self):
        if not self.over:
            self.over = True
            self.watch.close()
            self.sock.close()
            os.close(self.pidfd)

    def _after_fork_in_child(self):
        self.over = True
        self.sock.close()
        os.close(self.pidfd)
