"""The factory of the pipe "cpu": where to listen, and how to connect."""

from __future__ import annotations

from kvplug import ConfigError, PeerGoneError, TimeoutError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Connection,
    Credentials,
    Deadline,
    InsecureAddressError,
    Listener,
    Pipe,
    PipeContext,
    PipeEndpoint,
    PipeListener,
    Timeout,
    dial,
)
from kvplug_cpu import joining
from kvplug_cpu.contact import Contact
from kvplug_cpu.listener import CpuListener
from kvplug_cpu.options import CpuOptions
from kvplug_cpu.pipe import Tuning


class CpuEndpoint(PipeEndpoint):
    """Listens on an abstract Unix socket, on TCP, or on both, as options and host say."""

    def __init__(self, context: PipeContext) -> None:
        if context.device.partition(":")[0] != "cpu":
            raise ConfigError(f"the pipe 'cpu' moves CPU tensors, and the device is {context.device!r}")
        self._context = context
        self._options: CpuOptions = context.options if context.options is not None else CpuOptions()
        self._tuning = Tuning(
            max_in_flight_bytes=self._options.max_in_flight_bytes,
            split_bytes=self._options.split_bytes,
            socket_buffer_bytes=self._options.socket_buffer_bytes,
            timeout_s=context.timeout_s,
            heartbeat_timeout_s=context.heartbeat_timeout_s,
        )

    def listen(self) -> PipeListener:
        listeners: list[Listener] = []
        try:
            listeners.extend(
                Listener.open(address, self._context.credentials, joining.PURPOSE)
                for address in self._addresses()
            )
            return CpuListener(listeners, lanes=self._options.connections, tuning=self._tuning)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._context.timeout_s)
        reachable = Contact.parse(contact).reachable()
        for last, where in enumerate(reachable, 1 - len(reachable)):
            try:
                return joining.connect(
                    lambda where=where: self._dial(where, deadline),  # type: ignore[misc]
                    self._options.connections,
                    self._tuning,
                    deadline,
                )
            except PeerGoneError:
                if last == 0:
                    raise
        raise AssertionError("a contact has at least one address")

    def _dial(self, contact: str, deadline: Deadline) -> Connection:
        if deadline.expired:
            raise TimeoutError("no time was left to open the connections of a pipe")
        return dial(contact, self._context.credentials, joining.PURPOSE, deadline.remaining())

    def _addresses(self) -> list[str]:
        """The fast one first. Off loopback both, so that a peer on this host still gets the fast one."""
        host, kind = self._context.host, self._options.socket
        if host.startswith("unix:"):
            if kind == "tcp":
                raise ConfigError(f"the host {host!r} is a Unix socket, and the option socket is 'tcp'")
            return ["unix:"]
        tcp = f"[{host}]:0" if ":" in host else f"{host}:0"
        if kind == "auto":
            return ["unix:", tcp] if _other_hosts_reach(tcp) else ["unix:"]
        return ["unix:"] if kind == "unix" else [tcp]


def _other_hosts_reach(address: str) -> bool:
    """The core decides that: it is what it wants a secret for."""
    try:
        Credentials().require_secret(address)
    except InsecureAddressError:
        return True
    return False
