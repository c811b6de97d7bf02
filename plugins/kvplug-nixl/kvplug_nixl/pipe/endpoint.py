"""The factory of the pipe "nixl"."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from kvplug.transport import Address, Connection, Deadline, DuplexEndpoint, Pipe, PipeEndpoint
from kvplug_nixl.pipe import join
from kvplug_nixl.pipe.options import NixlPipeOptions
from kvplug_nixl.pipe.pipe import NixlDevice, NixlPipeSettings


class NixlContact(DuplexEndpoint.Contact):
    """``nixl1 <domain> <address> [<address>]``: one or more listening addresses."""

    TRANSPORT = "nixl"
    MAX_ADDRESSES = 2
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace; set its host to an"
        " address that can be reached from here"
    )


class NixlEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket, and where other hosts are to connect on TCP as well."""

    CONTACT = NixlContact
    PURPOSE = join.PURPOSE
    JOIN_TIMEOUT_S = 20.0  # the first agent of a process loads UCX

    def __init__(self, context: PipeEndpoint.Context) -> None:
        super().__init__(context)
        self._options: NixlPipeOptions = context.options if context.options is not None else NixlPipeOptions()
        host = context.host
        self._only_loopback = host.startswith("unix:") or Address(host).is_loopback
        self._settings = NixlPipeSettings.of(
            context,
            device=NixlDevice(context.device),
            inline_bytes=self._options.inline_bytes,
            expected_gb_per_s=self._options.expected_gb_per_s,
            max_in_flight_bytes=self._options.max_in_flight_bytes,
        )

    def _addresses(self) -> Sequence[str]:
        host = self._context.host
        if host.startswith("unix:"):
            return super()._addresses()
        if self._only_loopback:
            return ("unix:",)
        return ("unix:", str(Address(host)))

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        return join.make_pipe(
            connection,
            self._settings,
            self._options,
            deadline,
            only_loopback=_is_of_this_host(connection),
            accepted=accepted,
        )


def _is_of_this_host(connection: Connection) -> bool:
    """Whether the connection shows that the peer is on this host: then UCX needs no other interface."""
    if connection.sock.family == socket.AF_UNIX:
        return True
    return Address(connection.sock.getpeername()[0]).is_loopback
