"""The directory "etcd" with real servers: what the kit does not know of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import certificates

from etcd_server import EtcdServer
from kvplug import ConfigError
from kvplug.kit import check_options
from kvplug.transport import Directory
from kvplug_etcd.directory import EtcdDirectory
from kvplug_etcd.gateway import Gateway
from kvplug_etcd.options import EtcdOptions
from kvplug_testing import check_plugin


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


def directory(url: str, *, timeout_s: float = 5.0, **options: Any) -> Directory:
    return EtcdDirectory(
        Directory.Context(
            options=check_options(EtcdOptions, options, where="options.etcd"), url=url, timeout_s=timeout_s
        )
    )


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("etcd") == ()


def test_a_server_that_does_not_answer_is_passed_over(server: EtcdServer) -> None:
    gone = directory(f"etcd://127.0.0.1:1,{server.address},127.0.0.1:2/over")
    gone.announce("engine/0", b"mine", 30)
    assert gone.entries() == {"engine/0": b"mine"}
    nowhere = directory("etcd://127.0.0.1:1,127.0.0.1:2/over")
    with pytest.raises(OSError, match=r"no etcd server .*0\.0\.1:1: .*0\.0\.1:2: .*refused"):
        nowhere.entries()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://", "URL of etcd is wrong"),
        ("etcd://user:secret@127.0.0.1:2379", "users and passwords are options"),
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
        ({"user": "kv", "password_file": "/nowhere"}, "cannot be read"),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, "tls_ca: nothing was given"),
    ],
)
def test_wrong_options_are_named_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        directory("etcd://127.0.0.1:2379", **options)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., EtcdServer]]:
    """Makes servers of a test's own."""
    with contextlib.ExitStack() as stack:

        def make(*options: str, **given: Any) -> EtcdServer:
            server = EtcdServer(tmp_path, *options, **given)
            stack.callback(server.kill)
            return server

        yield make


def assert_works(mine: Directory) -> None:
    mine.announce("engine/0", b"mine", 30)
    assert mine.entries() == {"engine/0": b"mine"}


def test_a_server_that_was_killed_and_lost_all_is_told_again(tmp_path: Path, made: Any) -> None:
    server = made()
    mine = directory(f"etcd://{server.address}")
    mine.announce("engine/0", b"mine", 30)
    server.kill()
    with pytest.raises(OSError, match="no etcd server answers"):
        mine.announce("engine/0", b"mine", 30)
    (tmp_path / "data").rename(tmp_path / "lost")
    server.start()
    assert_works(mine)
    mine.close()


def test_users_and_passwords(tmp_path: Path, made: Any) -> None:
    server = made("--auth-token-ttl=1", "--bcrypt-cost=4")
    password, wrong = tmp_path / "password", tmp_path / "wrong"
    password.write_text("a password\n")
    wrong.write_text("another\n")
    given = {"context": None, "user": None, "password": None, "timeout_s": 5}
    call = Gateway([server.address], **given).call  # type: ignore[arg-type]
    for name in ("root", "kv"):
        call("auth/user/add", name=name, password="a password")
        call("auth/role/add", name=name)
        call("auth/user/grant", user=name, role=name)
    prefix, end = "b3Vycy8=", "b3VyczA="  # ours/, ours0
    call("auth/role/grant", name="kv", perm={"permType": "READWRITE", "key": prefix, "range_end": end})
    call("auth/enable")
    url, user = f"etcd://{server.address}/ours", {"user": "kv"}
    with pytest.raises(Exception, match="user name is empty"):
        directory(url).entries()
    with pytest.raises(Exception, match="authentication failed") as error:
        directory(url, **user, password_file=str(wrong)).entries()
    assert "another" not in str(error.value)
    mine = directory(url, **user, password_file=str(password))
    assert_works(mine)
    time.sleep(2.5)
    assert mine.entries() == {"engine/0": b"mine"}, "a token that is over is replaced"
    with pytest.raises(Exception, match="permission denied"):
        directory(f"etcd://{server.address}/theirs", **user, password_file=str(password)).entries()


def test_tls(tmp_path: Path, made: Any) -> None:
    files = certificates(tmp_path)
    options = [f"--cert-file={files['cert']}", f"--key-file={files['key']}"]
    options += [f"--trusted-ca-file={files['ca']}", "--client-cert-auth=true"]
    url = f"etcd://{made(*options, scheme='https').address}"
    client = {"tls_cert": files["cert"], "tls_key": files["key"]}
    assert_works(directory(url, tls_ca=files["ca"], **client))
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        directory(url, tls_ca=files["stranger"], **client).entries()
    with pytest.raises(Exception, match="etcd"):
        directory(url).entries()
