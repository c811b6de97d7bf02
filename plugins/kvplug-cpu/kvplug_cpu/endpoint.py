"""The factory of the pipe "cpu": its contact, where to listen, and how to connect."""

from __future__ import annotations

from kvplug import ConfigError
from kvplug.transport import Address, Deadline, DuplexEndpoint, Listener, Pipe, PipeEndpoint, PipeListener
from kvplug_cpu import join
from kvplug_cpu.options import CpuOptions
from kvplug_cpu.pipe import CpuPipeSettings


class CpuContact(DuplexEndpoint.Contact):
    """``cpu1 <domain> <address> [<address> ...]``."""

    TRANSPORT = "cpu"
    MAX_ADDRESSES = 4
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace; set its"
        " option socket to 'tcp' and its host to an address that can be reached from here"
    )


class CpuEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket, on TCP, or on both, depending on options and host."""

    CONTACT = CpuContact
    PURPOSE = join.PURPOSE

    def __init__(self, context: PipeEndpoint.Context) -> None:
        if context.device.partition(":")[0] != "cpu":
            raise ConfigError(f"the pipe 'cpu' moves CPU tensors, and the device is {context.device!r}")
        super().__init__(context)
        self._options: CpuOptions = context.options if context.options is not None else CpuOptions()
        self._settings = CpuPipeSettings.of(
            context,
            max_in_flight_bytes=self._options.max_in_flight_bytes,
            split_bytes=self._options.split_bytes,
            socket_buffer_bytes=self._options.socket_buffer_bytes,
        )

    def _addresses(self) -> list[str]:
        """The faster address first. Off loopback both: a peer on this host still uses the faster one."""
        host, kind = self._context.host, self._options.socket
        if host.startswith("unix:"):
            if kind == "tcp":
                raise ConfigError(f"the host {host!r} is a Unix socket, and the option socket is 'tcp'")
            return [Address.beside(host)]
        tcp = f"[{host}]:0" if ":" in host else f"{host}:0"
        if kind == "auto":
            return ["unix:"] if Address(host).is_loopback else ["unix:", tcp]
        return ["unix:"] if kind == "unix" else [tcp]

    def _listener(self, listeners: list[Listener], contact: str) -> PipeListener:
        return join.CpuListener(
            listeners, contact, max_connections=self._options.connections, settings=self._settings
        )

    def _connect(self, address: str, deadline: Deadline) -> Pipe:
        return join.connect(
            lambda: self._dial(address, deadline), self._options.connections, self._settings, deadline
        )
