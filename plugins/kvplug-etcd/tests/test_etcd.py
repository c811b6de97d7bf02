"""The directory "etcd" with real servers: what the kit does not know of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from etcd_server import EtcdServer
from kvplug import ConfigError
from kvplug.transport import Directory, DirectoryContext, check_options
from kvplug_etcd.directory import EtcdDirectory
from kvplug_etcd.options import EtcdOptions
from kvplug_testing import check_plugin


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


def directory(url: str, *, timeout_s: float = 5.0, **options: Any) -> Directory:
    return EtcdDirectory(
        DirectoryContext(
            options=check_options(EtcdOptions, options, where="options.etcd"), url=url, timeout_s=timeout_s
        )
    )


def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("etcd") == ()


def test_a_server_that_does_not_answer_is_passed_over(server: EtcdServer) -> None:
    gone = directory(f"etcd://127.0.0.1:1,{server.address},127.0.0.1:2/over")
    gone.announce("engine/0", b"mine", 30)
    assert gone.entries() == {"engine/0": b"mine"}
    nowhere = directory("etcd://127.0.0.1:1,127.0.0.1:2/over")
    with pytest.raises(OSError, match=r"no etcd server .*0\.0\.1:1: .*0\.0\.1:2: .*refused"):
        nowhere.entries()


def test_a_server_that_was_killed_and_lost_all_is_told_again(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    try:
        mine = directory(f"etcd://{server.address}")
        mine.announce("engine/0", b"mine", 30)
        server.kill()
        with pytest.raises(OSError, match="no etcd server answers"):
            mine.announce("engine/0", b"mine", 30)
        (tmp_path / "data").rename(tmp_path / "lost")
        server.start()
        mine.announce("engine/0", b"mine", 30)
        assert mine.entries() == {"engine/0": b"mine"}
        mine.close()
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://", "URL of etcd is wrong"),
        ("etcd://user:secret@127.0.0.1:2379", "users and passwords are options"),
        ("etcd://127.0.0.1:99999", "the last port is 65535"),
        ("etcd://unix:/run/etcd", "its port or name is missing"),
        ("etcd://127.0.0.1:2379/a b", "URL of etcd is wrong"),
    ],
)
def test_a_wrong_url_is_named_and_shows_no_password(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        directory(url)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"user": "kv"}, "password_file: nothing was given"),
        ({"password_file": "/nowhere"}, "user: nothing was given"),
        ({"user": "kv", "password_file": "/nowhere"}, "cannot be read"),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, "tls_ca: nothing was given"),
        ({"tls_ca": "/nowhere"}, "TLS files cannot be used"),
    ],
)
def test_wrong_options_are_named_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        directory("etcd://127.0.0.1:2379", **options)


def test_users_and_passwords(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    password, wrong = tmp_path / "password", tmp_path / "wrong"
    password.write_text("a password\n")
    wrong.write_text("another\n")
    try:
        admin = directory(f"etcd://{server.address}", timeout_s=20)  # to hash a password takes long
        call = admin._gateway.call  # type: ignore[attr-defined]
        for name in ("root", "kv"):
            call("auth/user/add", name=name, password="a password")
            call("auth/role/add", name=name)
            call("auth/user/grant", user=name, role=name)
        prefix, end = "b3Vycy8=", "b3VyczA="  # ours/, ours0
        permission = {"permType": "READWRITE", "key": prefix, "range_end": end}
        call("auth/role/grant", name="kv", perm=permission)
        call("auth/enable")
        url = f"etcd://{server.address}/ours"
        with pytest.raises(Exception, match="user name is empty"):
            directory(url).entries()
        with pytest.raises(Exception, match="authentication failed") as error:
            directory(url, timeout_s=20, user="kv", password_file=str(wrong)).entries()
        assert "another" not in str(error.value)
        mine = directory(url, timeout_s=20, user="kv", password_file=str(password))
        mine.announce("engine/0", b"mine", 30)
        assert mine.entries() == {"engine/0": b"mine"}
        mine._gateway._token = "stale.1"  # type: ignore[attr-defined]
        assert mine.entries() == {"engine/0": b"mine"}, "a token that is over is replaced"
        theirs_url = f"etcd://{server.address}/theirs"
        theirs = directory(theirs_url, timeout_s=20, user="kv", password_file=str(password))
        with pytest.raises(Exception, match="permission denied"):
            theirs.entries()
    finally:
        server.kill()


def test_tls(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = {name: str(tmp_path / name) for name in ("ca", "cert", "key", "stranger")}
    authority.cert_pem.write_to_path(files["ca"])
    stranger.cert_pem.write_to_path(files["stranger"])
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(files["key"])
    for pem in issued.cert_chain_pems:
        pem.write_to_path(files["cert"], append=True)
    options = [f"--cert-file={files['cert']}", f"--key-file={files['key']}"]
    options += [f"--trusted-ca-file={files['ca']}", "--client-cert-auth=true"]
    server = EtcdServer(tmp_path, *options, scheme="https")
    try:
        url = f"etcd://{server.address}"
        client = {"tls_cert": files["cert"], "tls_key": files["key"]}
        mine = directory(url, tls_ca=files["ca"], **client)
        mine.announce("engine/0", b"mine", 30)
        assert mine.entries() == {"engine/0": b"mine"}
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            directory(url, tls_ca=files["stranger"], **client).entries()
        with pytest.raises(Exception, match="etcd"):
            directory(url).entries()
    finally:
        server.kill()
