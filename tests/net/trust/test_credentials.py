from __future__ import annotations

import copy
import logging
import os
from pathlib import Path

import pytest

from kvplug.config.addresses import Address
from kvplug.errors import ConfigError, InsecureAddressError
from kvplug.net.trust.challenge import Mode
from kvplug.net.trust.credentials import Credentials, Secret
from kvplug.net.trust.tls import TlsFiles

HIDDEN = "correct horse battery staple"


def test_a_secret_is_never_shown() -> None:
    credentials = Credentials(Secret(HIDDEN))
    for shown in (repr(credentials), str(credentials), repr(credentials.secret), f"{credentials.secret}"):
        assert "correct" not in shown
    assert credentials.secret is not None
    assert credentials.secret.reveal() == HIDDEN.encode()
    with pytest.raises(TypeError):
        copy.copy(credentials.secret)  # the way every serialiser takes


def test_a_secret_comes_from_the_environment_or_a_file_without_white_space(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(HIDDEN + "\n")
    file.chmod(0o600)
    environ = {"KVPLUG_SECRET": "  " + HIDDEN.upper() + " \n"}
    from_env = Credentials.load(environ=environ)
    from_file = Credentials.load(secret_file=file, environ=environ)
    assert from_env.secret is not None and from_env.secret.reveal() == HIDDEN.upper().encode()
    assert from_file.secret is not None and from_file.secret.reveal() == HIDDEN.encode()
    assert Credentials.load(environ={}) == Credentials()


@pytest.mark.parametrize("content", ["", "short", "x" * 5000])
def test_a_bad_secret_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "the-file"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="the-file") as caught:
        Secret.from_file(file)
    assert not content or content not in str(caught.value)
    with pytest.raises(ConfigError, match="no-such-file"):
        Secret.from_file(tmp_path / "no-such-file")


def test_a_secret_file_that_others_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secret"
    file.write_text(HIDDEN)
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        Secret.from_file(file)
    assert "chmod 600" in caplog.text
    assert "correct" not in caplog.text
    os.unlink(file)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.1.2.3", "no-such-host.invalid"]
)
def test_tcp_needs_a_secret_or_tls_and_a_unix_socket_neither(host: str) -> None:
    address, tls = Address(host, 0), TlsFiles(cert="c", key="k", ca="a")
    with pytest.raises(InsecureAddressError, match=r"host: .*set secret_file.*kvplug config secret FILE"):
        Credentials().mode_at(address, "host")
    assert Credentials(Secret(HIDDEN)).mode_at(address) is Mode.SECRET
    assert Credentials(Secret(HIDDEN), tls).mode_at(address) is Mode.SECRET
    assert Credentials(tls=tls).mode_at(address) is Mode.CERTIFICATE
    for own in ("kvplug-x", "/run/kvplug/store.sock"):
        assert Credentials().mode_at(Address(name=own)) is Mode.SAME_USER
        assert Credentials(tls=tls).mode_at(Address(name=own)) is Mode.SAME_USER
