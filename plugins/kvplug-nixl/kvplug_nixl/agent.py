"""A NIXL agent with the UCX backend: what a pipe needs of it, with errors of kvplug's."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import PeerGoneError, TransportError
from kvplug.transport import Memfd, NamedExhaustion, close_after_fork
from kvplug_nixl.library import nixl
from kvplug_nixl.ucx_log import UcxLog

if TYPE_CHECKING:
    from torch import Tensor

_MAX_REGIONS: Final = 256
"""How many regions stay registered although no transfer uses them."""
_SWEEP_EVERY: Final = 16
"""After so many new regions those whose storage is gone are looked for."""
_MAX_EXPORTED: Final = 4096
"""After so many new regions a peer forgets the old ones: NIXL keeps about 700 bytes for each."""
_MAKING: Final = "making a NIXL agent"
_DESCRIPTORS: Final = 32
_THREADS: Final = 2
_ADDRESSES: Final = 256 << 20
"""Bytes of address space: buffers that UCX maps, and the stacks of its threads."""
_FILE_BYTES: Final = 32 << 20
"""Of shared memory, which counts as a file."""
_INFINIBAND: Final = Path("/sys/class/infiniband")

_creating: Final = threading.Lock()
_log: UcxLog | None = None
_is_foreign = False
"""This process was forked from one that had loaded UCX, whose threads are missing here."""
_immortal: Final[list[object]] = []

HOST: Final = -1
"""Instead of the index of a GPU."""
Span = tuple[int, int, int]
"""Address and length of contiguous memory in bytes, and NIXL's number for it: the index of its GPU;
in memory of the host a new one for each region. A peer never forgets single regions, and would else take a
region for an old one that it overlaps."""


class NixlError(TransportError):
    """NIXL or UCX failed. The message names the operation."""


@attrs.define(eq=False)
class Region:
    """The memory of one storage, registered as a whole."""

    handle: Any
    storage: weakref.ref[Any]
    """Dead when the last tensor with this storage is gone."""
    device: int
    """Of the GPU; :data:`HOST` for memory of the host."""
    number: int
    """As in a span."""
    address: int
    nbytes: int
    uses: int = 0
    """How many messages under way lie in it."""
    is_exported: bool = False
    """Whether the peer was sent its metadata."""


@attrs.frozen(eq=False)
class Exported:
    """Memory that the peer may read until it is released."""

    spans: tuple[Span, ...]
    regions: tuple[Region, ...]
    metadata: bytes
    """Metadata that the peer has to load before it reads; may be empty."""
    starts_anew: bool
    """Whether the metadata is complete, and replaces all that the peer has loaded."""


class Agent:
    """One agent with one peer. Any thread may call it. Each call takes the lock and is short.

    Registered memory stays readable for the peer until the storage it belongs to is gone and a later call
    notices that.
    """

    def __init__(self, *, error_handling: str, only_loopback: bool, tls: str = "") -> None:
        """``error_handling``: UCX's mode for endpoints, "none" or "peer". ``only_loopback``: no socket that
        another host can reach is opened. ``tls``: the transports that UCX may use; empty: what the
        environment says.

        Raises:
            NixlError: NIXL cannot be loaded, or makes no agent; the message has the reason.
            ResourceExhaustedError: there is no descriptor, thread or memory for it.
        """
        self.name = f"kvplug-{secrets.token_hex(8)}"
        self.lock = threading.RLock()
        self._regions: OrderedDict[tuple[int, int], Region] = OrderedDict()
        """By address and number of bytes of the storage."""
        self._num_exported = 0
        self._numbers = itertools.count(1)
        self._sweep_at = _SWEEP_EVERY
        self._peer = ""
        self._agent: Any = _new_agent(self.name, error_handling, only_loopback=only_loopback, tls=tls)
        close_after_fork(self)

    @property
    def is_open(self) -> bool:
        return self._agent is not None

    # -- the peer ----------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        """Return NIXL's description of this agent: how to reach it, and all regions that are registered."""
        with self._calling("describing this agent"):
            for region in self._regions.values():
                region.is_exported = True
            self._num_exported = 0
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, name: str) -> None:
        """Load the description of the peer. It replaces an earlier one.

        Raises:
            NixlError: it is not the metadata of the agent with this name.
        """
        with self._calling("loading the metadata of the peer's memory"):
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            found = self._agent.add_remote_agent(metadata)
            self._peer = found.decode() if isinstance(found, bytes) else str(found)
        if self._peer != name:
            raise NixlError(f"the metadata is of the agent {self._peer!r}, not of {name!r}")

    def load(self, metadata: bytes, *, starts_anew: bool) -> None:
        """Load the metadata of memory that the peer has exported."""
        if starts_anew:
            self.connect(metadata, self._peer)
        elif metadata:
            with self._calling("loading the metadata of the peer's memory"):
                self._agent.add_remote_agent(metadata)

    def lanes(self) -> str:
        """Return UCX's text about the lanes from the peer; empty if UCX was loaded before this package."""
        return "" if _log is None else _log.lanes_of(self.name)

    # -- memory of this process ----------------------------------------------------------------------------

    def export(self, tensors: Sequence[Tensor]) -> Exported:
        """Let the peer read contiguous tensors of one device, until :meth:`release`. The caller keeps them
        alive."""
        with self._calling("registering memory"):
            regions = self._registered(tensors)
            new = list({id(each): each for each in regions if not each.is_exported}.values())
            starts_anew = bool(new) and self._num_exported + len(new) > _MAX_EXPORTED
            metadata = b""
            if starts_anew:
                metadata = self.metadata()
            elif new:
                metadata = self._metadata_of(new)
            return Exported(_spans(tensors, regions), tuple(regions), metadata, starts_anew)

    def register(self, tensors: Sequence[Tensor]) -> tuple[list[Span], list[Region]]:
        """Register contiguous tensors that are read into, until :meth:`release` of the regions."""
        with self._calling("registering memory"):
            regions = self._registered(tensors)
            return list(_spans(tensors, regions)), regions

    def release(self, regions: Sequence[Region]) -> None:
        """End one use of each region, which may then be unregistered."""
        with self.lock:
            for region in regions:
                region.uses -= 1

    def progress(self) -> None:
        """Let UCX serve the peer's reads, if it needs this process for them."""
        with self._calling("serving the peer"):
            self._agent.get_new_notifs()

    def _metadata_of(self, regions: Sequence[Region]) -> bytes:
        """Return the metadata that the peer has to load before it reads these regions."""
        descs = [(each.address, each.nbytes, each.number, "") for each in regions]
        for region in regions:
            region.is_exported = True
        self._num_exported += len(regions)
        listed = self._agent.get_reg_descs(descs, _kind(regions[0].device))
        return bytes(self._agent.get_partial_agent_metadata(listed, False, ["UCX"]))

    def _registered(self, tensors: Sequence[Tensor]) -> list[Region]:
        """Return the region of each tensor, and count one more use of each."""
        found: list[Region] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes())
            region = self._regions.get(key)
            if region is not None and region.storage() is not storage and not region.uses:
                self._unregister(key)
                region = None
            if region is None:
                self._forget_expired()
                region = self._regions[key] = self._register(storage)
            self._regions.move_to_end(key)
            region.uses += 1
            found.append(region)
        return found

    def _register(self, storage: Any) -> Region:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        device = HOST if storage.device.type == "cpu" else storage.device.index
        number = next(self._numbers) if device == HOST else device
        handle = self._agent.register_memory([(address, nbytes, number, "")], _kind(device), ["UCX"])
        return Region(handle, weakref.ref(storage), device, number, address, nbytes)

    def _unregister(self, key: tuple[int, int]) -> None:
        region = self._regions.pop(key)
        self._agent.deregister_memory(region.handle, ["UCX"])

    def _forget_expired(self) -> None:
        """After every 16 new regions, unregister those whose storage is gone, and the least recently used of
        too many."""
        if len(self._regions) < self._sweep_at:
            return
        unused = [key for key, region in self._regions.items() if not region.uses]
        too_many = len(self._regions) - _MAX_REGIONS
        for number, key in enumerate(unused):
            if number <= too_many or self._regions[key].storage() is None:
                self._unregister(key)
        self._sweep_at = len(self._regions) + _SWEEP_EVERY

    # -- reading the peer's memory -------------------------------------------------------------------------

    def read(
        self, local: Sequence[Span], remote: Sequence[Span], *, here: int = HOST, there: int = HOST
    ) -> Read:
        """Begin to copy the peer's memory into registered memory, span by span of equal lengths.

        Args:
            here: The GPU of the local memory, or :data:`HOST`.
            there: The same of the peer's memory.

        Raises:
            NixlError: the copy was not begun.
            PeerGoneError: the peer is gone.
        """
        with self._calling("reading the peer's memory"):
            agent = self._agent
            ours, theirs = (
                agent.get_xfer_descs(list(spans), _kind(device))
                for spans, device in ((local, here), (remote, there))
            )
            read = Read(self, agent.initialize_xfer("READ", ours, theirs, self._peer))
            read.begin()
            return read

    def close(self) -> None:
        """Release everything. No read may be under way, unless its memory stays allocated. Idempotent."""
        with self.lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for region in self._regions.values():
                with contextlib.suppress(Exception):
                    agent.deregister_memory(region.handle, ["UCX"])
            self._regions.clear()
            if self._peer:
                with contextlib.suppress(Exception):
                    agent.remove_remote_agent(self._peer)
            agent.agent = None  # NIXL's own object: an exception may hold a frame that knows the wrapper

    def _after_fork_in_child(self) -> None:
        global _is_foreign
        _is_foreign = True
        agent, self._agent = self._agent, None
        if agent is not None:  # taking it down would wait for threads that are not here
            _immortal.extend((agent, list(self._regions.values())))
            for each in (agent, agent.agent):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

    @contextlib.contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Hold the lock, and map errors of NIXL to errors of kvplug."""
        with self.lock:
            if self._agent is None:
                raise NixlError(f"{what}: the agent is closed")
            try:
                yield
            except (TransportError, PeerGoneError):
                raise
            except Exception as e:
                NamedExhaustion.check(e, what)
                # The frames would keep handles of NIXL, and these its agent, with its threads.
                cause = e.with_traceback(None)
                if type(e).__name__ == "nixlRemoteDisconnectError":
                    raise PeerGoneError(f"{what}: UCX has lost the peer") from cause
                raise NixlError(f"{what}: {type(e).__name__}: {e}") from cause


class Read:
    """One copy under way."""

    def __init__(self, agent: Agent, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = "PROC"

    def begin(self) -> None:
        """Begin the copy. Needs the agent's lock. Raises what NIXL raises."""
        self._look(lambda agent: agent.transfer(self._handle))

    def is_done(self) -> bool:
        """Whether the memory has the peer's bytes. Lets UCX continue the copy.

        Raises:
            NixlError, PeerGoneError: it failed, and nothing is written any more.
        """
        if self._state == "PROC":
            with self._agent._calling("reading the peer's memory"):
                self._look(lambda agent: agent.check_xfer_state(self._handle))
        if self._state == "ERR":
            raise NixlError("reading the peer's memory: UCX reports a failure")
        return self._state == "DONE"

    def forget(self) -> None:
        """Release the read: the agent is about to be closed, which ends it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):  # NIXL releases what is under way with an error
                self._agent._agent.release_xfer_handle(handle)

    def _look(self, ask: Callable[[Any], str]) -> None:
        state = "ERR"
        try:
            state = ask(self._agent._agent)
        finally:
            self._state = state
            if state != "PROC":
                self.forget()


def _spans(tensors: Sequence[Tensor], regions: Sequence[Region]) -> tuple[Span, ...]:
    return tuple(
        (tensor.data_ptr(), tensor.numel() * tensor.element_size(), region.number)
        for tensor, region in zip(tensors, regions, strict=True)
    )


def _kind(device: int) -> str:
    return "DRAM" if device == HOST else "VRAM"


def _ensure_resources() -> None:
    """Raises ResourceExhaustedError: a resource that an agent needs is not available."""
    with NamedExhaustion(_MAKING):
        mmap.mmap(-1, _ADDRESSES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        os.close(Memfd.create("kvplug-nixl", _FILE_BYTES))
    NamedExhaustion.ensure_available(_MAKING, descriptors=_DESCRIPTORS, threads=_THREADS)


def _new_agent(name: str, error_handling: str, *, only_loopback: bool, tls: str) -> Any:
    global _log
    if _is_foreign:
        raise NixlError(
            "this process was forked from one that had loaded UCX, whose threads are missing here; start it"
            " with the method 'spawn', or fork before the first pipe 'nixl'"
        )
    environment = {"UCX_TLS": tls} if tls else {}
    if only_loopback and "UCX_NET_DEVICES" not in os.environ:
        environment["UCX_NET_DEVICES"] = "lo"
    if not _INFINIBAND.exists() and "UCX_MODULES" not in os.environ:
        environment["UCX_MODULES"] = "^ib"  # where there is no RDMA it has been seen to crash
    if "UCX_RCACHE_ENABLE" not in os.environ:
        # A thread that forks or unmaps memory changes the cache while another one is in UCX, which crashed.
        # An agent registers memory once, and needs no other cache.
        environment["UCX_RCACHE_ENABLE"] = "n"
    with _creating:
        if _log is None and "UCX_LOG_FILE" not in os.environ and "UCX_LOG_LEVEL" not in os.environ:
            _log = UcxLog()
            environment |= _log.settings
        _ensure_resources()
        try:
            with nixl(environment) as api:
                agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
                agent.create_backend("UCX", {"ucx_error_handling_mode": error_handling})
        except TransportError:
            raise
        except Exception as e:
            NamedExhaustion.check(e, _MAKING)
            _ensure_resources()  # NIXL does not report what ran out
            raise NixlError(f"NIXL makes no agent with UCX here: {type(e).__name__}: {e}") from e
    return agent
