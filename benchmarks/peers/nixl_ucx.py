"""NIXL over UCX shared memory: the sender writes into memory that the receiver has registered."""

from __future__ import annotations

import os

import torch

from kvplug_bench.links import Link, Rendezvous, UnavailableError

SMALL_BYTES = 64
"""Such messages land in memory of their own and are copied out: the same memory serves them all."""
_DONE, _MEMORY = b"D", b"M"


class Nixl(Link):
    """One registration for each size and each source, done before the time that is measured.

    Both ends poll, which is how NIXL is used. Nothing says that the memory may be written again: a receiver
    has what it waits for when as many notifications have come.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        os.environ.setdefault("UCX_TLS", "shm,self")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl_agent(f"end {rendezvous.rank}", config)
        # UCX cannot tell over shared memory that a peer has failed, and by default NIXL insists that it can.
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        self._landing = torch.zeros(SMALL_BYTES // 2, dtype=torch.float16)
        self._agent.register_memory(self._landing)
        rendezvous.send(self._agent.get_agent_metadata())
        name = self._agent.add_remote_agent(rendezvous.recv())
        self._other = name.decode() if isinstance(name, bytes) else name
        self._done = 0
        self._memories: dict[int, int] = {}
        self._registered: dict[tuple[int, int], torch.Tensor] = {}
        self._handles: dict[tuple[int, int, int], object] = {}
        self._told: set[tuple[int, int]] = set()
        self._tell(self._landing)

    def send(self, tensor: torch.Tensor) -> None:
        while tensor.nbytes not in self._memories:
            self._look()
        address = self._memories[tensor.nbytes]
        key = (tensor.data_ptr(), tensor.nbytes, address)
        handle = self._handles.get(key)
        if handle is None:
            handle = self._handles[key] = self._prepared(tensor, address)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended in {state}")

    def receive(self, out: torch.Tensor) -> None:
        small = out.nbytes == SMALL_BYTES
        if not small and (out.data_ptr(), out.nbytes) not in self._told:
            self._tell(out)
        while not self._done:
            self._look()
        self._done -= 1
        if small:
            out.copy_(self._landing)

    def receive_new(self, like: torch.Tensor) -> torch.Tensor:
        raise UnavailableError("memory that is new each time would have to be registered each time")

    def close(self) -> None:
        for handle in self._handles.values():
            self._agent.release_xfer_handle(handle)

    def _tell(self, memory: torch.Tensor) -> None:
        """Where messages of this size are to be written."""
        self._register(memory)
        self._told.add((memory.data_ptr(), memory.nbytes))
        text = f"{memory.data_ptr()} {memory.nbytes} ".encode()
        self._agent.send_notif(self._other, _MEMORY + text + self._agent.get_agent_metadata())

    def _register(self, memory: torch.Tensor) -> None:
        key = (memory.data_ptr(), memory.nbytes)
        if key not in self._registered:
            self._agent.register_memory(memory)
            self._registered[key] = memory

    def _prepared(self, tensor: torch.Tensor, address: int) -> object:
        self._register(tensor)
        local = self._agent.get_xfer_descs(tensor)
        remote = self._agent.get_xfer_descs([(address, tensor.nbytes, 0)], "DRAM")
        return self._agent.initialize_xfer("WRITE", local, remote, self._other, _DONE)

    def _look(self) -> None:
        for message in self._agent.get_new_notifs().get(self._other, ()):
            if message == _DONE:
                self._done += 1
            else:
                address, nbytes, metadata = message[1:].split(b" ", 2)
                self._agent.add_remote_agent(metadata)
                self._memories[int(nbytes)] = int(address)
