"""Every error kvplug raises. Imports nothing.

An error that also *is* a builtin one inherits it, so that ``except TimeoutError`` or
``except ConnectionError`` in code that does not know kvplug works as expected.
"""

from __future__ import annotations

import builtins


class KvplugError(Exception):
    """Base of every error raised by kvplug and by well-behaved plugins.

    ``code`` is the cause in a word or two, where errors of a class have several, and ``change`` the line or
    command that mends it; else they are empty.
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
        """Where the configuration comes from, such as a file; empty where that is not known."""
        where = f" in {source}" if source else ""
        if len(faults) == 1:
            text = f"bad configuration{where}: {faults[0]}"
        else:
            lines = "".join(f"\n  - {fault}" for fault in faults)
            text = f"bad configuration{where}, {len(faults)} faults:{lines}"
        super().__init__(text)


class InsecureAddressError(ConfigError, PermissionError):
    """An address other hosts can reach was asked for without a secret."""


# -- plugins -----------------------------------------------------------------------------------


class PluginError(KvplugError):
    """Something is wrong with a plugin, or with the name of one."""


class PluginLoadError(PluginError, ImportError):
    """A plugin was found and could not be loaded. The message says which, why, and what to do."""


class UnknownNameError(PluginError, LookupError):
    """No loaded plugin offers that name for that kind."""


class UnknownConnectorError(UnknownNameError):
    """No loaded plugin offers a connector of that name."""


class UnknownTransportError(UnknownNameError):
    """No loaded plugin offers a transport (pipe, queue, lookup buffer, communicator) of that name."""


class AmbiguousNameError(PluginError, LookupError):
    """Two distributions offer one name of one kind; write ``distribution:name``."""


# -- endpoints at work -------------------------------------------------------------------------


class ClosedError(KvplugError, ValueError):
    """The endpoint was closed or aborted here, or belongs to the parent of this forked process."""


class PeerGoneError(KvplugError, ConnectionError):
    """The process at the other end died or closed, or counts as dead after a silence."""

    closed: bool = False
    """The other end closed by itself and announced it, and not within a message."""


class TimeoutError(KvplugError, builtins.TimeoutError):
    """A deadline passed. The message names what the call waited for, and which process."""


class StalledError(TimeoutError):
    """Nothing of a transfer came for too long, though its peer lives: it is stopped, or too slow."""


class CancelledError(KvplugError, RuntimeError):
    """The caller's own ``cancel`` event was set while it waited. Nothing was taken."""


class BusyError(KvplugError, RuntimeError):
    """Two threads used the same direction of one endpoint at once."""


class TensorMismatchError(KvplugError, ValueError):
    """Tensors that must match do not, or a message does not fit the memory offered, and stays."""


class UnsupportedError(KvplugError, TypeError):
    """A value, dtype or device is not supported here. The message names what is supported."""


class CapacityError(KvplugError, ValueError):
    """A value is larger than the whole budget it would have to fit into; waiting cannot help."""


class LayoutError(KvplugError, ValueError):
    """A tensor, or a range of blocks, is not what the KV cache's layout says. Nothing was copied."""


class AddressInUseError(KvplugError, OSError):
    """Another process already listens at that address."""


class EntryGoneError(KvplugError, LookupError):
    """The lookup entry existed when it was promised and no longer does."""


class LentError(KvplugError, RuntimeError):
    """The entry is leased, and that lease excludes the one that was asked for."""


class TransportError(KvplugError, OSError):
    """A transport failed in a way that no other error describes; the cause is chained."""


class SlowPathError(TransportError):
    """A pipe carries far less than its transport claims, or than before, and ``slow_path`` is "refuse"."""


class ResourceExhaustedError(TransportError):
    """A process, this one or a peer's, has no free descriptor, thread, memory or space; names which.

    It is the system's state now, and nothing remembers it: the next call may succeed. ``resource`` is one of
    ``descriptors``, ``threads``, ``memory`` and ``space`` (of a file system); ``errno`` is the system's
    number, where it has given one.
    """

    def __init__(self, text: str, *, resource: str = "", errno: int | None = None) -> None:
        self.resource = resource
        """``descriptors``, ``threads``, ``memory`` or ``space``; empty where that is not known."""
        super().__init__(text)
        self.errno = errno
        """The system's number; ``None`` where it has given none."""


# -- agreement and trust -----------------------------------------------------------------------


class WireError(KvplugError, ValueError):
    """Bytes that are not what the wire format allows."""


class AuthenticationError(KvplugError, PermissionError):
    """The peer did not prove its identity (wrong secret, wrong user, wrong certificate)."""


class Reason(str):
    """One reason of a refused handshake: a sentence, and its parts."""

    field: str
    """The field of the handshake; ``transport NAME`` for one transport of those that were considered."""
    what: str
    """The two values, or what is wrong."""
    change: str
    """What to change; empty where the reason before says it."""

    def __new__(cls, field: str, what: str, change: str = "") -> Reason:
        reason = super().__new__(cls, f"{field}: {what}" + (f"; {change}" if change else ""))
        reason.field, reason.what, reason.change = field, what, change
        return reason


class HandshakeError(KvplugError):
    """The two ends cannot work together. ``reasons`` holds every reason, with both values."""

    remote: object = None
    """The peer's Hello, where it could be read."""

    def __init__(self, *reasons: str, peer: str = "") -> None:
        self.reasons: tuple[str, ...] = reasons
        """Every reason, one sentence each, with both values; a :class:`Reason` where this end found it."""
        self.peer = peer
        """The other end, for messages; empty where it is not known."""
        with_whom = f" with {peer}" if peer else ""
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        super().__init__(f"handshake{with_whom} refused:{lines}")


class IntegrityError(KvplugError):
    """Received memory does not hash to what its sender stated."""
