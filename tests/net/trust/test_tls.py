"""TLS under the challenge: both ends verified, what is refused, and the plain socket that users get."""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

trustme = pytest.importorskip("trustme")  # the environment with the oldest dependencies has none

from kvplug import AuthenticationError, Config, ConfigError, PeerGoneError  # noqa: E402
from kvplug.assembly.resolve import credentials_of  # noqa: E402
from kvplug.net.trust.connection import Connection  # noqa: E402
from kvplug.net.trust.credentials import Credentials, Secret  # noqa: E402
from kvplug.net.trust.tls import ListenerTls, TlsFiles  # noqa: E402
from kvplug_testing.pairs import accepting  # noqa: E402
from kvplug_testing.waits import until  # noqa: E402

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

SECRET = Secret("the secret of these tests")
OURS = ("127.0.0.1", "::1", "localhost")


def write(folder: Path, ca: Any, *names: str, trusts: Any = None, **more: Any) -> TlsFiles:
    """Files of a new certificate by ``ca`` for ``names``, which accepts those that ``trusts`` has signed."""
    leaf = ca.issue_cert(*(names or OURS), **more)
    folder.mkdir(parents=True, exist_ok=True)
    leaf.private_key_pem.write_to_path(folder / "key.pem")
    with open(folder / "cert.pem", "wb") as f:
        f.writelines(blob.bytes() for blob in leaf.cert_chain_pems)
    (trusts or ca).cert_pem.write_to_path(folder / "ca.pem")
    return TlsFiles(cert=str(folder / "cert.pem"), key=str(folder / "key.pem"), ca=str(folder / "ca.pem"))


@pytest.fixture(scope="module")
def ca() -> Any:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture(scope="module")
def files(ca: Any, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return write(tmp_path_factory.mktemp("tls"), ca)


@pytest.fixture
def both(files: TlsFiles) -> Credentials:
    return Credentials(SECRET, files)


def pair(credentials: Credentials, address: str = "127.0.0.1:0") -> tuple[socket.socket, socket.socket]:
    with accepting(address, credentials, "test") as listener:
        ours = Connection.dial(listener.contact, credentials, "test", 10)
        return ours.sock, listener.accept(10).sock


def read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (chunk := sock.recv(size - len(data))):
        data += chunk
    return bytes(data)


# -- both ends are verified --------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["TLS alone", "secret"])
def test_two_ends_meet_over_tls(address: str, secret: Secret | None, files: TlsFiles) -> None:
    ours, theirs = pair(Credentials(secret, files), address)
    ours.sendall(b"to the listener")
    theirs.sendall(b"to the dialler")
    assert (read(theirs, 15), read(ours, 14)) == (b"to the listener", b"to the dialler")
    ours.close()
    assert theirs.recv(1) == b""
    theirs.close()


def test_no_byte_of_the_data_is_on_the_wire_in_clear(both: Credentials) -> None:
    with accepting("127.0.0.1:0", both, "test") as listener, Wire(listener.contact) as wire:
        ours = Connection.dial(wire.address, both, "test", 10).sock
        theirs = listener.accept(10).sock
        ours.sendall(b"the prompt of a user " * 100)
        assert read(theirs, 2100) == b"the prompt of a user " * 100
        ours.close()
        theirs.close()
    assert len(wire.seen) > 2100
    assert b"prompt" not in wire.seen
    assert str(os.getpid()).encode() not in wire.seen  # the identity of a process is under TLS as well


def test_a_relay_that_ends_tls_with_a_certificate_of_its_own_cannot_pass_on_the_proof(
    both: Credentials, ca: Any, tmp_path: Path
) -> None:
    """The secret's proof is bound to the TLS session: an insider without the secret gets nothing."""
    insider = write(tmp_path, ca)
    with accepting("127.0.0.1:0", both, "test") as listener, Wire(listener.contact, insider) as wire:
        with pytest.raises((AuthenticationError, PeerGoneError)):
            Connection.dial(wire.address, both, "test", 10)
        until(lambda: listener.refusals, what="the refusal of a proof that was passed on")
        assert listener.refusals == {"credentials": 1}
    assert b"KVPT" in wire.seen  # it read the challenge


def test_a_certificate_need_not_name_the_host_if_the_config_allows_it(
    files: TlsFiles, ca: Any, tmp_path: Path
) -> None:
    elsewhere = Credentials(SECRET, write(tmp_path, ca, "gpu7.example.org"))
    lenient = TlsFiles(cert=files.cert, key=files.key, ca=files.ca, check_host=False)
    with accepting("127.0.0.1:0", elsewhere, "test") as listener:
        Connection.dial(listener.contact, Credentials(SECRET, lenient), "test", 10).close()


@pytest.mark.parametrize("what", ["no certificate", "TLS 1.2"])
def test_another_tls_client_is_refused(what: str, both: Credentials, files: TlsFiles) -> None:
    context = ssl.create_default_context(cafile=files.ca)
    if what == "TLS 1.2":
        context.load_cert_chain(files.cert, files.key)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    with accepting("127.0.0.1:0", both, "test") as listener:
        host, port = listener.contact.split(":")
        raw = socket.create_connection((host, int(port)), 10)
        with (
            context.wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False) as client,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            client.do_handshake()
            client.recv(1)
        until(lambda: listener.refusals, what="the refusal")
        assert listener.refusals == {"credentials": 1}


# -- one end with TLS, one without -------------------------------------------------------------------


def refusal_of(listening: Credentials, dialling: Credentials) -> tuple[str, dict[str, int]]:
    """The error of the dialler, and what the listener counts."""
    with accepting("127.0.0.1:0", listening, "test") as listener:
        with pytest.raises(AuthenticationError) as failed:
            Connection.dial(listener.contact, dialling, "test", 10)
        until(lambda: listener.refusals, what="the refusal")
        return str(failed.value), listener.refusals


def test_each_mistake_is_refused_with_a_message_that_the_page_shows(
    both: Credentials, files: TlsFiles, ca: Any, tmp_path: Path
) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "encrypt-with-tls.md"
    rows = re.findall(r"^\| `([^`]*)` \|", page.read_text(encoding="utf-8").partition("## When")[2], re.M)
    keys = {"host": "127.0.0.1", "tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
    another = Credentials(SECRET, write(tmp_path / "another", trustme.CA(), trusts=ca))
    elsewhere = write(tmp_path / "elsewhere", ca, "gpu7.example.org")
    messages = []
    for mistake in ({"host": "unix:@name"}, {"tls_key": elsewhere.key}, {"tls_key": None, "tls_ca": None}):
        with pytest.raises(ConfigError) as refused:
            credentials_of(Config.from_dict({**keys, **mistake}))
        messages.append(str(refused.value))
    plain, misnamed = Credentials(SECRET), Credentials(SECRET, elsewhere)
    for listening, dialling, expected, counted in (
        (another, both, "check tls_ca here and tls_cert there", {"credentials", "silent"}),
        (misnamed, both, "IP address mismatch.*which must name that host", {"credentials", "silent"}),
        (both, another, "refused our certificate", {"credentials", "silent"}),
        (both, plain, "set tls_cert, tls_key and tls_ca", {"credentials"}),
        (plain, both, "set tls_cert, tls_key and tls_ca", {"credentials"}),
    ):
        text, refusals = refusal_of(listening, dialling)
        assert re.search(expected, text) and sum(refusals.values()) == 1 and set(refusals) <= counted, text
        messages.append(text)
    assert len(rows) == len(messages)
    for row in rows:
        pattern = ".*".join(map(re.escape, row.split("…")))
        assert [each for each in messages if re.search(pattern, each)], (pattern, messages)


def test_unix_sockets_use_no_tls(both: Credentials) -> None:
    ours, theirs = pair(both, "unix:")
    assert not [thread for thread in threading.enumerate() if thread.name == "kvplug-relay"]
    ours.close()
    theirs.close()


def test_a_client_that_connects_and_hangs_up_did_not_fail_a_handshake(both: Credentials) -> None:
    with accepting("127.0.0.1:0", both, "test") as listener:
        host, port = listener.contact.split(":")
        socket.create_connection((host, int(port)), 10).close()
        until(lambda: listener.refusals, what="the refusal")
        assert listener.refusals == {"silent": 1}


def test_strangers_at_a_tls_listener_delay_no_honest_client(
    both: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplug.net.trust.listener._PROOF_TIMEOUT_S", 1.0)
    with accepting("127.0.0.1:0", both, "test") as listener:
        host, port = listener.contact.split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(12)]
        for number, sock in enumerate(strangers):
            sock.sendall(
                (b"", b"\x16", b"\x16\x03\x01\x02\x00" + b"x" * 40, b"GET / HTTP/1.1\r\n")[number % 4]
            )
        Connection.dial(listener.contact, both, "test", 10).close()
        listener.accept(10).close()
        until(lambda: sum(listener.refusals.values()) == 12, what="the end of every stranger")
        assert set(listener.refusals) == {"silent", "credentials"}
        for sock in strangers:
            sock.close()


# -- files -------------------------------------------------------------------------------------------


def test_renewed_files_are_used_by_the_next_connection(
    files: TlsFiles, ca: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = write(tmp_path, trustme.CA(), trusts=ca)  # not accepted by the other end
    with accepting("127.0.0.1:0", Credentials(SECRET, renewed), "test") as listener:
        with pytest.raises(AuthenticationError):
            Connection.dial(listener.contact, Credentials(SECRET, files), "test", 10)
        write(tmp_path, ca)
        Connection.dial(listener.contact, Credentials(SECRET, files), "test", 10).close()
        listener.accept(10).close()
        # A key without its certificate: the old pair goes on.
        before = Path(renewed.key).read_bytes()
        write(tmp_path / "next", ca)
        os.replace(tmp_path / "next" / "key.pem", renewed.key)
        Connection.dial(listener.contact, Credentials(SECRET, files), "test", 10).close()
        listener.accept(10).close()
        assert "the changed TLS files cannot be used yet" in caplog.text
        assert Path(renewed.key).read_bytes() != before


def test_an_encrypted_key_is_refused_and_no_password_is_asked_for(files: TlsFiles, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = key.private_bytes(
        pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"unknown")
    )
    (tmp_path / "key.pem").write_bytes(locked)
    encrypted = TlsFiles(cert=files.cert, key=str(tmp_path / "key.pem"), ca=files.ca)
    with pytest.raises(ConfigError, match="the key is encrypted"):
        ListenerTls(encrypted)


# -- the plain socket --------------------------------------------------------------------------------


class Wire:
    """A relay between a dialler and a listener that records what it sees.

    That is the bytes of the connection, or with ``files`` those inside two TLS sessions of its own.
    """

    def __init__(self, target: str, files: TlsFiles | None = None) -> None:
        host, port = target.split(":")
        self._target = host, int(port)
        self._files = files
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.seen = b""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Wire:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        inner: socket.socket = self._listening.accept()[0]
        outer: socket.socket = socket.create_connection(self._target)
        try:
            if self._files is not None:
                inner = self._files.for_listener().wrap_socket(inner, server_side=True)
                outer = self._files.for_dialler().wrap_socket(outer, server_hostname=self._target[0])
            directions = [
                threading.Thread(target=self._carry, args=ends) for ends in ((inner, outer), (outer, inner))
            ]
            for thread in directions:
                thread.start()
            for thread in directions:
                thread.join(20)
        finally:
            inner.close()
            outer.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
        except OSError:
            pass
        try:
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
