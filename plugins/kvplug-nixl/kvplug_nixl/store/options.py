"""Options of the store "nixl"."""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from kvplug.transport import Address, option

_PREFIX: Final = re.compile(r"/?[A-Za-z0-9!_.()'-]+(/[A-Za-z0-9!_.()'-]+)*")
"""Characters that every S3 server accepts in keys without encoding."""


def _prefix(_: Any, __: Any, given: str) -> None:
    if len(given) > 100 or not _PREFIX.fullmatch(given):
        raise ValueError("allowed are up to 100 letters, digits and !_.()'-, and / between them")


ENDPOINT: Final = re.compile(r"(?P<scheme>https?)://(?P<server>[^/]+)/?")


def _endpoint(_: Any, __: Any, given: str | None) -> None:
    found = None if given is None else ENDPOINT.fullmatch(given)
    if given is not None and (found is None or found["server"].startswith("unix:")):
        raise ValueError("allowed is http://host:port or https://host")
    if found is not None:
        Address.parse_server(found["server"], 443)


def _path(_: Any, __: Any, given: str | None) -> None:
    if given == "":
        raise ValueError("allowed is the path of a folder")


@attrs.frozen(kw_only=True)
class NixlStoreOptions:
    """Options of the store "nixl", which keeps pages in a folder or in a bucket of S3."""

    path: str | None = option(
        default=None,
        help="Folder of the pages, for NIXL's backend POSIX; created if it is missing. Or give bucket.",
        validator=_path,
    )
    size: int | None = option(
        default=None,
        unit="bytes",
        at_least=1,
        help="Bytes that the pages in the folder may use on the disk; equal for all processes. None:"
        " 16 GiB. A bucket is bounded by its lifecycle rule instead.",
    )
    bucket: str | None = option(
        default=None, help="Bucket of the pages, for NIXL's backend OBJ. It must exist. Or give path."
    )
    prefix: str = option(
        default="kvplug",
        help="Beginning of the names of all objects. Deployments that share a bucket need different ones.",
        validator=_prefix,
    )
    endpoint: str | None = option(
        default=None,
        help="URL of the S3 server, such as http://10.0.0.7:9000. None: AWS, in the region.",
        validator=_endpoint,
    )
    region: str = option(default="us-east-1", help="Region of the bucket.")
    access_key: str | None = option(
        default=None,
        help="Id of the access key. None: the AWS SDK looks in the environment, in its files, and at the"
        " instance.",
    )
    secret_key_file: str | None = option(
        default=None, help="File with the secret of access_key. Surrounding white space is ignored."
    )
    ca_file: str | None = option(
        default=None, help="PEM file with the authorities that may have signed the server's certificate."
    )
    virtual_addressing: bool = option(
        default=False, help="Whether the bucket's name is part of the host name, and not of the path."
    )
    transfers: int = option(
        default=4, at_least=1, help="How many pages are read and written at the same time."
    )
