"""The store "nixl" over a bucket in S3: NIXL's backend OBJ reads and writes the objects."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from kvplug import ClosedError, ConfigError, ResourceExhaustedError, TransportError
from kvplug.transport import Address, BlockingStore, WireError
from kvplug_nixl.store.agent import Agent, Move
from kvplug_nixl.store.options import ENDPOINT, NixlStoreOptions
from kvplug_nixl.store.pages import HEAD_BYTES, TAIL_BYTES, Head

_LAYOUT: Final = "1"
"""Version of the names and objects. Part of every name, so that a page of another version is a miss."""
_MIN_THREADS: Final = 16
"""The fewest threads of NIXL, which look for as many pages of a prompt at the same time."""
_ENVIRONMENT: Final = {
    # By default the AWS SDK tries ten times, and notices after half a minute that a server is gone.
    "AWS_RETRY_MODE": "standard",
    "AWS_MAX_ATTEMPTS": "2",
}
_MAX_SECRET_BYTES: Final = 4096
_CONNECT_S: Final = 1.0


class ObjectStore(BlockingStore):
    """Pages under keys, one object each, shared by every process that names the bucket and the prefix.

    An object is written and read as a whole. It is not written if its page exists; if two processes write one
    at the same moment, the last one wins. NIXL cannot delete objects: a page that is removed is overwritten
    with a head that says so.
    """

    is_shared = True

    def __init__(self, options: NixlStoreOptions) -> None:
        """Raises ConfigError: the options are wrong, or the secret cannot be read."""
        self.num_threads = options.transfers
        self._bucket = options.bucket
        self._prefix = f"{options.prefix.strip('/')}/{_LAYOUT}/"
        self._host, self._port = _server(options)
        self.location = f"bucket {self._bucket} at {self._host}:{self._port}"
        _secret(options)
        environment = dict(_ENVIRONMENT)
        if options.access_key is not None:
            environment["AWS_EC2_METADATA_DISABLED"] = "true"  # do not look for another key at the instance
        threads = max(_MIN_THREADS, options.transfers)
        self._agent = Agent("OBJ", lambda: _parameters(options, threads), environment, threads=threads)
        self._local = threading.local()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _staging(self, nbytes: int) -> memoryview:
        """Return memory of this thread. No transfer uses it, since the thread has waited for each."""
        memory = getattr(self._local, "memory", b"")
        if len(memory) < nbytes:
            memory = self._local.memory = bytearray(nbytes)
        return memoryview(memory)[:nbytes]

    # -- reading -------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._explained():
            there = self._agent.exists([self._name(key) for key in keys])
            present = [index for index, found in enumerate(there) if found]
            heads = memoryview(bytearray(HEAD_BYTES * len(present)))
            parts = [heads[at : at + HEAD_BYTES] for at in range(0, len(heads), HEAD_BYTES)]
            moves = [
                Move(part, name=self._name(keys[index])) for index, part in zip(present, parts, strict=True)
            ]
            moved = self._agent.move("READ", moves)
        held = {index for index, part, ok in zip(present, parts, moved, strict=True) if ok and _is_page(part)}
        return [index in held for index in range(len(keys))]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        name, wanted = self._name(key), sum(part.nbytes for part in into)
        whole = self._staging(HEAD_BYTES + wanted + TAIL_BYTES)
        whole[:HEAD_BYTES], whole[-TAIL_BYTES:] = bytes(HEAD_BYTES), bytes(TAIL_BYTES)
        with self._explained():
            for _ in range(2):  # NIXL does not say why a transfer has failed
                if self._agent.move("READ", [Move(whole, name=name)])[0]:
                    break
                if not self._agent.exists([name])[0]:
                    return None
            else:
                return 0  # an object without content, which will be removed as a wrong page
        try:
            head = Head.from_bytes(whole[:HEAD_BYTES])
        except WireError:
            return 0
        if head.is_removed:
            return None
        end = HEAD_BYTES + head.length
        if head.length <= wanted and whole[end : end + TAIL_BYTES] != head.tag:
            return 0  # it is cut off
        at = HEAD_BYTES
        for part in into:
            flat = part.cast("B")
            flat[:] = whole[at : at + flat.nbytes]
            at += flat.nbytes
        return head.length

    # -- writing -------------------------------------------------------------------------------

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        if not self.has([key])[0]:
            head = Head(sum(part.nbytes for part in page))
            self._put(key, [head.to_bytes(), *(part.cast("B") for part in page), head.tag])
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        for key, held in zip(keys, self._have_objects(keys), strict=True):
            if held:
                head = Head(0, is_removed=True)
                self._put(key, [head.to_bytes(), head.tag])

    def _have_objects(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has an object, which may be a page or not."""
        with self._explained():
            return self._agent.exists([self._name(key) for key in keys])

    def _put(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write an object. Raises PermissionError: the server answers, but refuses it."""
        whole = self._staging(sum(map(len, parts)))
        at = 0
        for part in parts:
            whole[at : at + len(part)] = part
            at += len(part)
        with self._explained():
            if not self._agent.move("WRITE", [Move(whole, name=self._name(key))])[0]:
                self._agent.exists([self._name(key)])  # raises if it does not answer
                raise PermissionError(
                    f"the S3 server {self._host}:{self._port} answers, but refuses an object for the bucket"
                    f" {self._bucket!r}: does the bucket exist, and has the key the right s3:PutObject?"
                )

    # -- errors --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (ResourceExhaustedError, ClosedError):
            raise
        except TransportError as e:
            raise TransportError(f"{e}; {self._reason()}") from e

    def _reason(self) -> str:
        """Return what an operator may check. NIXL does not say why a call has failed."""
        try:
            socket.create_connection((self._host, self._port), _CONNECT_S).close()
        except OSError as e:
            return f"{self._host}:{self._port} does not answer: {e}"
        return (
            f"{self._host}:{self._port} accepts connections: does it answer, does the bucket {self._bucket!r}"
            " exist, and may the key read it (s3:GetObject, s3:ListBucket)? With NIXL_LOG_LEVEL=ERROR NIXL"
            " logs more"
        )

    def close(self) -> None:
        self._agent.close()


def _is_page(head: memoryview) -> bool:
    try:
        return not Head.from_bytes(head).is_removed
    except WireError:
        return False


def _server(options: NixlStoreOptions) -> tuple[str, int]:
    if options.endpoint is None:
        return f"s3.{options.region}.amazonaws.com", 443
    found = ENDPOINT.fullmatch(options.endpoint)
    assert found is not None, "the options have checked it"
    server = Address.parse_server(found["server"], 443 if found["scheme"] == "https" else 80)
    assert not server.is_unix
    return server.host, server.port


def _secret(options: NixlStoreOptions) -> str | None:
    """Return the content of ``secret_key_file``, or ``None`` if there is no file.

    Raises:
        ConfigError: the file cannot be read, or the other half of the key is missing.
    """
    if (options.access_key is None) != (options.secret_key_file is None):
        missing = "access_key" if options.access_key is None else "secret_key_file"
        raise ConfigError(f"options.nixl.{missing}: nothing was given; a key needs both")
    if options.secret_key_file is None:
        return None
    try:
        with open(options.secret_key_file, encoding="utf-8") as file:
            return file.read(_MAX_SECRET_BYTES).strip()
    except (OSError, ValueError) as e:
        raise ConfigError(f"options.nixl.secret_key_file: the file cannot be read: {e}") from e


def _parameters(options: NixlStoreOptions, threads: int) -> dict[str, str]:
    """Return the parameters of NIXL's backend OBJ."""
    given = {
        "bucket": options.bucket,
        "region": options.region,
        "access_key": options.access_key,
        "secret_key": _secret(options),
        "ca_bundle": options.ca_file,
        "endpoint_override": options.endpoint,
        "scheme": "http"
        if options.endpoint is not None and options.endpoint.startswith("http:")
        else "https",
        "use_virtual_addressing": str(options.virtual_addressing).lower(),
        "num_threads": str(threads),
        # pages have their own checksums, and not every server supports the newer ones of S3
        "req_checksum": "required",
        "resp_checksum": "required",
    }
    return {key: value for key, value in given.items() if value is not None}
