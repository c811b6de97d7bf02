"""Why a peer was not reached, as a finding."""

from __future__ import annotations

from kvplug.assembly.examination.finding import Finding, refusals
from kvplug.assembly.examination.host import secret_source
from kvplug.config import Config
from kvplug.errors import (
    AuthenticationError,
    ConfigError,
    HandshakeError,
    InsecureAddressError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    WireError,
)

_ONE_NAMESPACE = (
    "abstract Unix sockets and loopback addresses reach only processes in one network namespace: containers"
    " need --network=host, a socket in a shared folder (unix:/path), or an address and a secret"
)


def _is_of_one_namespace(contact: str) -> bool:
    return contact.startswith(("unix:@", "127.", "localhost:", "[::1]"))


def _is_of_tls(text: str) -> bool:
    return "TLS" in text or "certificate" in text


def unreachable(error: KvplugError, contact: str, config: Config) -> Finding:
    """What an error of dialling, or of the talk that followed, means for an operator."""
    why: tuple[str, ...] = (str(error),)
    if isinstance(error, HandshakeError):
        return refusals(error.reasons, "the peer")[0]
    if isinstance(error, InsecureAddressError):
        what, change = "it is reached over a network, and there is no secret", "export KVPLUG_SECRET=..."
        topic = "secret"
    elif isinstance(error, AuthenticationError) and _is_of_tls(str(error)):
        topic, what = "tls", "one end uses TLS, and the other does not, or not with the same authority"
        change = "tls_cert, tls_key, tls_ca: at both ends, with one authority; or at neither"
    elif isinstance(error, AuthenticationError):
        topic, what = "secret", "one end has not proved itself to the other"
        source = secret_source(config)
        why = (*why, f"this end's secret is that of {source}" if source else "this end has no secret")
        change = "KVPLUG_SECRET or secret_file: the same at both ends; or the listener's whole contact"
    elif isinstance(error, ResourceExhaustedError):
        topic, what, change = "descriptors", "a resource has run out", "ulimit -n 65536"
    elif isinstance(error, TimeoutError):
        topic = "peer"
        what = "it does not answer: it is stopped, overloaded, or a firewall drops what is sent"
        change = f"kill -CONT PID at the peer, or a rule of the firewall for {contact}"
    elif isinstance(error, PeerGoneError):
        topic = "peer"
        if "hung up" in str(error):
            what = (
                "a program listens there that is no kvplug, or is ending, or uses TLS when this end does not"
            )
            change = "--peer: the address in the engine's log; tls_cert, tls_key and tls_ca at both ends"
        else:
            what = "no process listens there"
            change = f'--peer, peers: the address in the engine\'s log ("serving pages at"), not {contact}'
        if _is_of_one_namespace(contact):
            why = (*why, _ONE_NAMESPACE)
    elif isinstance(error, ConfigError):
        topic, what, change = (
            "tls",
            "this end cannot connect with its configuration",
            "tls_cert, tls_key, tls_ca",
        )
    elif isinstance(error, WireError):
        topic, what = "peer", "it is no address of kvplug, or the program there speaks something else"
        change = "--peer HOST:PORT, unix:@NAME, or the listener's whole contact"
    else:
        topic, what, change = "peer", "it was not examined to the end", ""
    return Finding(topic=topic, verdict="problem", what=f"{contact}: {what}", why=why, change=change)
