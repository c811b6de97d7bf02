from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvplug.config.addresses import Address
from kvplug.errors import ConfigError, WireError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:29555", Address("127.0.0.1", 29555)),
        ("node-3.cluster:0", Address("node-3.cluster", 0)),
        ("[::1]:80", Address("::1", 80)),
        ("[fe80::1%eth0]:80", Address("fe80::1%eth0", 80)),
        ("unix:@kvplug-a", Address(name="kvplug-a")),
        ("unix:", Address(name="")),
        ("unix:/run/kvplug/store.sock", Address(name="/run/kvplug/store.sock")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1", "::1:80", "a b:80", "host:80:90",
     "unix:kvplug-a", "unix:@-x", "unix:@a b", "unix:@a\0b", "unix:@" + "a" * 108, "host:\u0661",
     "127.0.0.1", "::1", "::1:29555", "[::1]", "host:99999", "host:port", "host:1/x", "1.2.3:80", "a..b:80",
     "-a:80", "[1.2.3.4]:80", "[::g]:80", "999.1.1.1:80", "tcp://host:80",
     "unix:/", "unix:/a/", "unix:/a b", "unix:/a\0", "unix:/a?token=x", "unix:/" + "a" * 107],
)  # fmt: skip
def test_an_invalid_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        Address.parse(text)


def test_a_server_has_a_port_or_a_name_and_may_have_a_usual_port() -> None:
    assert Address.parse_server("10.0.0.7", 6379) == Address("10.0.0.7", 6379)
    assert Address.parse_server("[::1]", 6379) == Address("::1", 6379)
    assert Address.parse_server("10.0.0.7:1", 6379) == Address("10.0.0.7", 1)
    for text in ("10.0.0.7:", "10.0.0.7:0", "unix:", "::1"):
        with pytest.raises(ConfigError):
            Address.parse_server(text, 6379)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except ConfigError:
        return
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:0", "unix:", "nonsense", "tcp://127.0.0.1:5", "127.0.0.1:5?token=abc", "127.0.0.1:5/a",
     "host:80" + " " * 600, "\x1b[2J:80"],
)  # fmt: skip
def test_an_invalid_contact_is_a_wire_error_of_printable_text(text: str) -> None:
    with pytest.raises(WireError) as caught:
        Address.parse_contact(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("localhost", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False), ("no-such-host.invalid", False), ("0", False),
    ],
)  # fmt: skip
def test_loopback_is_what_only_this_host_can_reach(host: str, expected: bool) -> None:
    assert Address(host).is_loopback is expected
