"""NIXL over UCX shared memory, with nothing around it: the sender writes, or the receiver reads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable

import torch

from kvplug_bench.links import Link, Rendezvous, UnavailableError

SMALL_BYTES = 64
"""Such messages land in memory of their own and are copied out: the same memory serves them all."""
_DONE, _MEMORY, _OFFER = b"D", b"M", b"O"


class _NixlLink(Link):
    """Memory is registered, and told to the other end, before the time that is measured. Both ends poll, as
    NIXL is meant to be used.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        os.environ.setdefault("UCX_TLS", "shm,self")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl_agent(f"end {rendezvous.rank}", config)
        # UCX cannot tell over shared memory that a peer has failed, and by default NIXL insists that it can.
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        rendezvous.send(self._agent.get_agent_metadata())
        name = self._agent.add_remote_agent(rendezvous.recv())
        self._other = name.decode() if isinstance(name, bytes) else name
        self._registered: dict[tuple[int, int], torch.Tensor] = {}
        self._handles: dict[tuple[int, int, int], object] = {}

    def receive_new(self, like: torch.Tensor) -> torch.Tensor:
        raise UnavailableError("memory that is new each time would have to be registered each time")

    def close(self) -> None:
        for handle in self._handles.values():
            self._agent.release_xfer_handle(handle)

    def _register(self, memory: torch.Tensor) -> bool:
        """Whether it was not registered before."""
        key = (memory.data_ptr(), memory.nbytes)
        if key in self._registered:
            return False
        self._agent.register_memory(memory)
        self._registered[key] = memory
        return True

    def _transfer(self, operation: str, memory: torch.Tensor, address: int) -> None:
        """Between memory of this end's and as many bytes at an address of the other's."""
        key = (memory.data_ptr(), memory.nbytes, address)
        handle = self._handles.get(key)
        if handle is None:
            self._register(memory)
            local = self._agent.get_xfer_descs(memory)
            remote = self._agent.get_xfer_descs([(address, memory.nbytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer(operation, local, remote, self._other, _DONE)
            self._handles[key] = handle
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended in {state}")

    def _notifications(self) -> Iterable[bytes]:
        return self._agent.get_new_notifs().get(self._other, ())


class Nixl(_NixlLink):
    """The sender writes. Nothing says that the memory may be written again: a receiver has what it waits for
    when as many notifications have come.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        self._landing = torch.zeros(SMALL_BYTES // 2, dtype=torch.float16)
        self._done = 0
        self._memories: dict[int, int] = {}
        self._told: set[tuple[int, int]] = set()
        self._register(self._landing)
        self._tell(self._landing)

    def send(self, tensor: torch.Tensor) -> None:
        while tensor.nbytes not in self._memories:
            self._look()
        self._transfer("WRITE", tensor, self._memories[tensor.nbytes])

    def receive(self, out: torch.Tensor) -> None:
        small = out.nbytes == SMALL_BYTES
        if not small and (out.data_ptr(), out.nbytes) not in self._told:
            self._tell(out)
        while not self._done:
            self._look()
        self._done -= 1
        if small:
            out.copy_(self._landing)

    def _tell(self, memory: torch.Tensor) -> None:
        """Where messages of this size are to be written."""
        self._register(memory)
        self._told.add((memory.data_ptr(), memory.nbytes))
        text = f"{memory.data_ptr()} {memory.nbytes} ".encode()
        self._agent.send_notif(self._other, _MEMORY + text + self._agent.get_agent_metadata())

    def _look(self) -> None:
        for message in self._notifications():
            if message == _DONE:
                self._done += 1
            else:
                address, nbytes, metadata = message[1:].split(b" ", 2)
                self._agent.add_remote_agent(metadata)
                self._memories[int(nbytes)] = int(address)


class NixlReading(_NixlLink):
    """The sender says where a message lies, and the receiver reads it, which tells the sender: as connectors
    of engines do. At most so many messages are offered and not yet read.
    """

    _MOST_OFFERED = 64

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        self._offered: deque[tuple[int, int]] = deque()
        self._unread = 0

    def send(self, tensor: torch.Tensor) -> None:
        while self._unread >= self._MOST_OFFERED:
            self._look()
        metadata = self._agent.get_agent_metadata() if self._register(tensor) else b""
        text = f"{tensor.data_ptr()} {tensor.nbytes} ".encode()
        self._agent.send_notif(self._other, _OFFER + text + metadata)
        self._unread += 1

    def receive(self, out: torch.Tensor) -> None:
        while not self._offered:
            self._look()
        address, nbytes = self._offered.popleft()
        if nbytes != out.nbytes:
            raise RuntimeError(f"{nbytes} bytes were offered for {out.nbytes}")
        self._transfer("READ", out, address)

    def _look(self) -> None:
        for message in self._notifications():
            if message == _DONE:
                self._unread -= 1
                continue
            address, nbytes, metadata = message[1:].split(b" ", 2)
            if metadata:
                self._agent.add_remote_agent(metadata)
            self._offered.append((int(address), int(nbytes)))
