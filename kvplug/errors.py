"""Every error kvplug raises. Imports nothing.

An error that also *is* a builtin one inherits it, so that ``except TimeoutError`` or
``except ConnectionError`` in code that does not know kvplug works as expected.
"""

from __future__ import annotations

import builtins


class KvplugError(Exception):
    """Base of every error raised by kvplug and by well-behaved plugins.

    ``code`` names the cause in a word or two if errors of the class have several causes. ``change`` is the
    line or command that fixes it. Both may be empty.
    """

    def __init__(self, *args: object, code: str = "", change: str = "") -> None:
        super().__init__(*args)
        self.code, self.change = code, change


# -- configuration -----------------------------------------------------------------------------


class ConfigError(KvplugError, ValueError):
    """A configuration is wrong. ``faults`` holds every fault found, one sentence each."""

    def __init__(self, *faults: str, source: str = "") -> None:
        self.faults: tuple[str, ...] = faults
        """Every fault, one sentence each."""
        self.source = source
        """Where the configuration comes from, such as a file; empty if unknown."""
        where = f" in {source}" if source else ""
        if len(faults) == 1:
            text = f"bad configuration{where}: {faults[0]}"
        else:
            lines = "".join("\n  - " + fault.replace("\n", "\n  ") for fault in faults)
            text = f"bad configuration{where}, {len(faults)} faults:{lines}"
        super().__init__(text)


class InsecureAddressError(ConfigError, PermissionError):
    """The configuration has an address that other hosts can reach, but neither a secret nor TLS."""


# -- plugins -----------------------------------------------------------------------------------


class PluginError(KvplugError):
    """A plugin, or the name of a plugin, is wrong."""


class PluginLoadError(PluginError, ImportError):
    """A plugin was found but could not be loaded. The message names it, the cause, and what to do."""


class UnknownNameError(PluginError, LookupError):
    """No loaded plugin offers that name for that kind."""


class UnknownConnectorError(UnknownNameError):
    """No loaded plugin offers a connector of that name."""


class UnknownTransportError(UnknownNameError):
    """No loaded plugin offers a transport (pipe, queue, lookup buffer, communicator) of that name."""


class AmbiguousNameError(PluginError, LookupError):
    """Two distributions offer the same name for the same kind; write ``distribution:name``."""


# -- endpoints at work -------------------------------------------------------------------------


class ClosedError(KvplugError, ValueError):
    """The endpoint was closed or aborted here, or belongs to the parent of this forked process."""


class PeerGoneError(KvplugError, ConnectionError):
    """The process at the other end died or closed, or was silent for so long that it counts as dead."""

    closed: bool = False
    """Whether the other end announced its close between two messages."""


class TimeoutError(KvplugError, builtins.TimeoutError):
    """A deadline passed. The message names what the call waited for, and which process."""


class StalledError(TimeoutError):
    """A transfer made no progress for too long although its peer lives: the peer is stopped or too slow."""


class CancelledError(KvplugError, RuntimeError):
    """The caller's ``cancel`` event was set while the call waited. Nothing was transferred."""


class BusyError(KvplugError, RuntimeError):
    """Two threads used the same direction of one endpoint at once."""


class TensorMismatchError(KvplugError, ValueError):
    """Tensors that must match differ, or a message does not fit the memory offered and is not received."""


class UnsupportedError(KvplugError, TypeError):
    """A value, dtype or device is not supported here. The message names what is supported."""


class CapacityError(KvplugError, ValueError):
    """A value is larger than the whole budget that it must fit into, so waiting cannot help."""


class LayoutError(KvplugError, ValueError):
    """A tensor or a range of blocks does not match the KV cache's layout. Nothing was copied."""


class AddressInUseError(KvplugError, OSError):
    """Another process already listens at that address."""


class EntryGoneError(KvplugError, LookupError):
    """A lookup entry that was promised no longer exists."""


class TransportError(KvplugError, OSError):
    """A transport failed in a way that no other error describes. The cause is chained."""


class SlowPathError(TransportError):
    """A pipe is far slower than its transport claims, or than before, and ``slow_path`` is "refuse"."""


class ResourceExhaustedError(TransportError):
    """This process or a peer ran out of descriptors, threads, memory or space; the message names which.

    The next call may succeed, since the error reports only the system's present state. ``resource`` is one of
    ``descriptors``, ``threads``, ``memory`` and ``space`` (of a file system); ``errno`` is the system's error
    number, if it gave one.
    """

    def __init__(self, text: str, *, resource: str = "", errno: int | None = None) -> None:
        self.resource = resource
        """``descriptors``, ``threads``, ``memory`` or ``space``; empty if unknown."""
        super().__init__(text)
        self.errno = errno
        """The system's error number, or ``None`` if it gave none."""


# -- agreement and trust -----------------------------------------------------------------------


class WireError(KvplugError, ValueError):
    """Received bytes violate the wire format."""


class AuthenticationError(KvplugError, PermissionError):
    """The peer did not prove its identity (wrong secret, wrong user, wrong certificate)."""


class Reason(str):
    """One reason why a handshake was refused: a sentence, and its parts."""

    field: str
    """The field of the handshake, or ``transport NAME`` for a transport that was considered."""
    what: str
    """The two values, or the fault."""
    change: str
    """What to change; empty if the previous reason gives it."""

    def __new__(cls, field: str, what: str, change: str = "") -> Reason:
        reason = super().__new__(cls, f"{field}: {what}" + (f"; {change}" if change else ""))
        reason.field, reason.what, reason.change = field, what, change
        return reason


class HandshakeError(KvplugError):
    """The two ends cannot work together. ``reasons`` holds every reason, with both values."""

    remote: object = None
    """The peer's Hello, if it could be read."""

    def __init__(self, *reasons: str, peer: str = "") -> None:
        self.reasons: tuple[str, ...] = reasons
        """Every reason, one sentence each, with both values; a :class:`Reason` if this end found it."""
        self.peer = peer
        """The other end, for messages; empty if unknown."""
        with_whom = f" with {peer}" if peer else ""
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        super().__init__(f"handshake{with_whom} refused:{lines}")


class IntegrityError(KvplugError):
    """The hash of the received bytes differs from the hash that the sender gave."""
