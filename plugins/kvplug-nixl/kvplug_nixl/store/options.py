"""Options of the store "nixl"."""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from kvplug.transport import Address, option

_PREFIX: Final = re.compile(r"/?[A-Za-z0-9!_.()'-]+(/[A-Za-z0-9!_.()'-]+)*")
"""Characters that every S3 takes in keys as they are."""


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
    """Options of the store "nixl": a folder, or a bucket in S3."""

    path: str | None = option(
        default=None,
        help="Folder of the pages, for NIXL's backend POSIX; created if it is missing. Or say bucket.",
        validator=_path,
    )
    size: int | None = option(
        default=None,
        unit="bytes",
        at_least=1,
        help="Bytes that the pages in the folder may use on the disk; all processes give the same. None:"
        " 16 GiB. A bucket has no bound here, but a lifecycle rule.",
    )
    bucket: str | None = option(
        default=None, help="Bucket of the pages, for NIXL's backend OBJ. It must exist. Or say path."
    )
    prefix: str = option(
        default="kvplug",
        help="What the names of all objects begin with. Deployments that share a bucket have different ones.",
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
        help="Id of the access key. None: what the AWS SDK finds in the environment, in its files, or at the"
        " instance.",
    )
    secret_key_file: str | None = option(
        default=None, help="File with the secret of access_key. White space around it does not count."
    )
    ca_file: str | None = option(
        default=None, help="PEM file with the authorities that may sign the server's certificate."
    )
    virtual_addressing: bool = option(
        default=False, help="Whether the bucket's name is part of the host name, and not of the path."
    )
    transfers: int = option(
        default=4, at_least=1, help="How many pages are read and written at the same time."
    )
