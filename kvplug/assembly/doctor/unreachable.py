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


def _address(contact: str) -> str:
    return f'--peer, peers: the address in the engine\'s log ("serving pages at"), not {contact}'


def line_for_resource(resource: str) -> str:
    """The line to change where a process, or its host, has run out of this."""
    lines = {
        "descriptors": "ulimit -n 65536",
        "threads": "ulimit -u unlimited    (or a higher pids.max of the container)",
        "memory": "ulimit -v unlimited    (or more memory for the container)",
        "space": "ulimit -f unlimited, or room on the file system",
    }
    return lines.get(resource, "ulimit -a    (shows the limits of a shell)")


def unreachable(error: KvplugError, contact: str, config: Config) -> Finding:
    """What an error of dialling, or of the talk that followed, means for an operator."""
    why: tuple[str, ...] = (str(error),)
    if isinstance(error, HandshakeError):
        return refusals(error.reasons, "the peer")[0]
    if isinstance(error, InsecureAddressError):
        what, change = (
            "it is an address of TCP, and there is no secret",
            "secret_file: what `kvplug config secret FILE` prints",
        )
        topic = "secret"
    elif isinstance(error, AuthenticationError) and "mismatch, certificate" in str(error):
        topic, what = "tls", "the certificate there names other hosts than the one that is dialled"
        host = contact.rpartition(":")[0]
        change = f"tls_cert: one with {host} as subjectAltName (there); or tls_check_host = false (here)"
    elif isinstance(error, AuthenticationError) and "certificate" in str(error):
        topic, what = "tls", "one end does not accept the certificate of the other one"
        change = "tls_ca, tls_cert: signed by one authority at both ends, and not expired"
    elif isinstance(error, AuthenticationError) and "TLS" in str(error):
        topic, what = "tls", "one end uses TLS, and the other does not"
        change = "tls_cert, tls_key, tls_ca: at both ends, with one authority; or at neither"
    elif isinstance(error, AuthenticationError) and "is not a kvplug listener" in str(error):
        topic, what = "peer", "another program listens there"
        change = _address(contact)
    elif isinstance(error, AuthenticationError):
        topic, what = "secret", "one end has not proved itself to the other"
        source = secret_source(config)
        why = (*why, f"this end's secret is that of {source}" if source else "this end has no secret")
        change = "KVPLUG_SECRET or secret_file: the same at both ends; or one user at both ends, on one host"
    elif isinstance(error, ResourceExhaustedError):
        topic, what = error.resource, "a resource has run out"
        change = line_for_resource(error.resource)
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
        elif "cannot be reached" in str(error):
            what = "no way leads there from this network namespace"
            why = (*why, "a container without the host's network has interfaces of its own; see `interfaces`")
            change = f"docker run --network=host    (or a route to {contact.rpartition(':')[0]})"
        elif "is not known" in str(error):
            what = "its name is not known here"
            change = _address(contact)
        else:
            what = "no process listens there"
            change = _address(contact)
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
        change = "--peer HOST:PORT, unix:@NAME or unix:/PATH"
    else:
        topic, what, change = "peer", "it was not examined to the end", ""
    return Finding(topic=topic, verdict="problem", what=f"{contact}: {what}", why=why, change=change)
