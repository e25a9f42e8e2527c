"""Addresses: a valid one is printed again character for character; others are refused with a reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.txrx import addresses
from strata.txrx.addresses import (
    Address,
    LocalAddress,
    RelayAddress,
    TcpAddress,
    TlsAddress,
    UnixAddress,
    parse_address,
)
from strata.txrx.errors import ErrorKind, InvalidAddress

LABEL = st.from_regex(r"[a-z0-9_]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
HOST_NAMES = st.one_of(
    st.lists(LABEL, min_size=1, max_size=4).map(".".join), st.ip_addresses(v=4).map(str), st.just("*")
)
IPV6 = st.one_of(
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda address: address.exploded),
    st.builds("{}%{}".format, st.ip_addresses(v=6), st.sampled_from(["eth0", "lo", "br-1.5"])),
)
HOSTS = st.one_of(HOST_NAMES, IPV6)
PORTS = st.integers(0, 65535)
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=25)
ADDRESSES = st.one_of(
    st.builds(LocalAddress, st.integers(0, 2**64 - 1)),
    st.builds(TcpAddress, HOSTS, PORTS),
    st.builds(TlsAddress, HOSTS, PORTS, st.sampled_from(["tls", "metatls"])),
    st.builds(UnixAddress, PATHS.map(lambda path: "/" + path)),
    st.builds(UnixAddress, PATHS.filter(bool).map(lambda name: "@" + name)),
    st.builds(
        RelayAddress,
        st.sampled_from(
            ["ws://localhost:8080", "wss://relay.example/a?b=c", "WSS://[::1]:1/", "wss://u:p@h"]
        ),
        st.sampled_from(["/app/1/orders/proto", "/", "/a#b", "/ä b"]),
    ),
)


@pytest.mark.req("T-095", "T-004")
@given(ADDRESSES)
def test_what_is_printed_is_read_again(address: Address) -> None:
    assert parse_address(str(address)) == address


@pytest.mark.req("T-095")
@given(
    st.one_of(
        st.text(max_size=40),
        st.builds(
            "{}:{}".format,
            st.sampled_from(["tcp", "tls", "metatls", "unix", "local", "relay"]),
            st.text("[]:%*@/#0123456789abf.wsx-", max_size=20),
        ),
    )
)
def test_any_text_is_refused_or_printed_as_it_was_read(text: str) -> None:
    try:
        address = parse_address(text)
    except InvalidAddress:
        return
    assert str(address) == text


@pytest.mark.req("T-004", "T-095")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("local:0", LocalAddress(0)),
        (f"local:{2**64 - 1}", LocalAddress(2**64 - 1)),
        ("tcp:127.0.0.1:80", TcpAddress("127.0.0.1", 80)),
        ("tcp:[::1]:0", TcpAddress("::1", 0)),
        ("tcp:[fe80::1%eth0]:9", TcpAddress("fe80::1%eth0", 9)),
        ("tcp:*:65535", TcpAddress("*", 65535)),
        ("tcp:a-b.example:1", TcpAddress("a-b.example", 1)),
        ("metatls:h:1", TlsAddress("h", 1, "metatls")),
        ("tls:h:1", TlsAddress("h", 1, "tls")),
        ("unix:/run/a b", UnixAddress("/run/a b")),
        ("unix:@name", UnixAddress("@name")),
        ("relay:wss://h/p#/a/1/b/c", RelayAddress("wss://h/p", "/a/1/b/c")),
    ],
)
def test_each_form(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.req("T-095")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no scheme"),
        ("localhost", "no scheme"),
        ("udp:h:1", "no scheme 'udp'"),
        ("TCP:h:1", "no scheme 'TCP'"),
        (" tcp:h:1", "no scheme ' tcp'"),
        ("local:", "the id"),
        ("local:-1", "the id"),
        ("local:01", "the id"),
        ("local:１", "the id"),
        (f"local:{2**64}", "the id"),
        ("local:" + "9" * 10_000, "the id"),
        ("tcp:", "HOST:PORT"),
        ("tcp:h", "HOST:PORT"),
        ("tcp::1", "is not a host"),
        ("tcp:h:", "the port"),
        ("tcp:h:65536", "the port"),
        ("tcp:h:080", "the port"),
        ("tcp:h:+1", "the port"),
        ("tcp:h:1\n", "the port"),
        ("tcp:::1:80", "in brackets"),
        ("tcp:[::1:80", "in brackets"),
        ("tcp:[127.0.0.1]:80", "not an IPv6 address"),
        ("tcp:[]:80", "not an IPv6 address"),
        ("tcp:[::g]:80", "not an IPv6 address"),
        ("tcp:[::1%]:80", "names no interface"),
        ("tcp:[::1%a b]:80", "names no interface"),
        ("tcp:a b:1", "is not a host"),
        ("tcp:-a:1", "is not a host"),
        ("tcp:a/b:1", "is not a host"),
        ("tcp:" + "a" * 300 + ":1", "is not a host"),
        ("tcp:" + "a" * 64 + ".org:1", "is not a host"),
        ("tls:a..org:1", "is not a host"),
        ("tls:h", "HOST:PORT"),
        ("metatls:h:x", "the port"),
        ("unix:", "absolute path"),
        ("unix:relative", "absolute path"),
        ("unix:@", "name is missing"),
        ("unix:/" + "a" * 107, "108 bytes"),
        ("unix:/" + "ä" * 54, "109 bytes"),
        ("unix:/a\0b", "no address can hold"),
        ("unix:/\ud800", "no address can hold"),
        ("relay:", "not a ws:// or wss:// URL"),
        ("relay:https://h#/t", "not a ws:// or wss:// URL"),
        ("relay:wss://#/t", "not a ws:// or wss:// URL"),
        ("relay:wss://h:x#/t", "not a ws:// or wss:// URL"),
        ("relay:wss://[::1#/t", "not a ws:// or wss:// URL"),
        ("relay:wss://h h#/t", "not a ws:// or wss:// URL"),
        ("relay:wss://h", "content topic"),
        ("relay:wss://h#", "content topic"),
        ("relay:wss://h#t", "content topic"),
        ("relay:wss://h#/t\n", "content topic"),
    ],
)
def test_what_is_no_address_is_refused_with_its_reason(text: str, says: str) -> None:
    with pytest.raises(InvalidAddress, match=says) as caught:
        parse_address(text)
    assert caught.value.kind is ErrorKind.INVALID_ADDRESS
    assert isinstance(caught.value, ValueError)


def test_a_path_may_be_as_long_as_a_socket_allows() -> None:
    assert parse_address("unix:/" + "a" * 106) == UnixAddress("/" + "a" * 106)
    abstract = parse_address("unix:@" + "a" * 106)
    assert isinstance(abstract, UnixAddress) and abstract.socket_path == "\0" + "a" * 106


@pytest.mark.req("T-090")
def test_abstract_names_are_for_linux_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "sys", SimpleNamespace(platform="linux"))
    name = parse_address("unix:@name")
    assert isinstance(name, UnixAddress) and name.is_abstract and name.socket_path == "\0name"
    monkeypatch.setattr(addresses, "sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(InvalidAddress, match="Linux"):
        parse_address("unix:@name")
    path = parse_address("unix:/name")
    assert isinstance(path, UnixAddress) and not path.is_abstract and path.socket_path == "/name"


@pytest.mark.req("T-096")
def test_addresses_are_values() -> None:
    texts = ["local:1", "tcp:h:1", "tls:h:1", "metatls:h:1", "unix:/p", "unix:@p", "relay:wss://h#/t"]
    named = {parse_address(text): text for text in texts}
    assert len(named) == len(texts)
    assert [named[parse_address(text)] for text in texts] == texts
