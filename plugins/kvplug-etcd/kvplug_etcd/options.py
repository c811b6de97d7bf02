"""Options of the directory "etcd"."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class EtcdOptions:
    """Options of the directory "etcd". The addresses and the prefix are in the URL in ``peers``."""

    user: str | None = option(default=None, help="Name of the etcd user. Needs password_file.")
    password_file: str | None = option(
        default=None, help="File with the user's password. Surrounding white space is ignored."
    )
    tls_ca: str | None = option(
        default=None, help="PEM file with the authority that signed the servers' certificates. Turns TLS on."
    )
    tls_cert: str | None = option(
        default=None, help="PEM file with this client's certificate, if the servers ask for one."
    )
    tls_key: str | None = option(default=None, help="PEM file with the private key of tls_cert.")
