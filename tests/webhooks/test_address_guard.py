"""No address of a tenant's choice reaches what only we can reach."""

import socket
from collections.abc import Sequence

import pytest

from tidemill.protocol.values import check_http_url
from tidemill.service.web_targets import Blocked, Target, check_target, is_public
from tidemill_webhooks.address_guard import pin, resolve_by_system

#: Each line a way in that was tried somewhere.
CLOSED = [
    "127.0.0.1",
    "127.1.2.3",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::8.8.8.8",
    "64:ff9b:1::a00:1",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "2001::1",
    "2001:0:7f00:1::",
    "2001:20::1",
    "2001:db8::1",
    "3fff::1",
    "100::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "",
    "localhost",
    "127.1",
    "2130706433",
    "0x7f000001",
]
OPEN = ["8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "::ffff:8.8.8.8"]
OPEN += ["2606:4700:4700::1111", "2a00:1450:4001:81b::200e"]


#: Hosts that lead inside by themselves, in any spelling that a resolver takes.
INSIDE = ["127.0.0.1", "127.0.0.1.", "169.254.169.254", "10.0.0.1", "[::1]", "[::ffff:10.0.0.1]"]
INSIDE += ["[64:ff9b::7f00:1]", "[fd00:ec2::254]", "127.1", "2130706433", "0x7f000001", "0x7f.1"]
INSIDE += ["0177.0.0.1", "0", "localhost", "LOCALHOST.", "a.localhost"]


@pytest.mark.parametrize("address", CLOSED)
def test_an_address_that_is_not_everybodys_is_closed(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", OPEN)
def test_a_public_address_is_open(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/", "only https"),
        ("ftp://example.com/", "not valid"),
        ("file:///etc/passwd", "not valid"),
        ("gopher://example.com/", "not valid"),
        ("https://", "not valid"),
        ("https:///path", "not valid"),
        ("//example.com/", "not valid"),
        ("https://user@example.com/", "user name"),
        ("https://user:pw@example.com/", "user name"),
        ("https://example.com@127.0.0.1/", "user name"),
        ("https://example.com\\@127.0.0.1/", "not valid"),
        ("https://exa mple.com/", "not valid"),
        ("https://example.com/\r\nHost: other", "not valid"),
        ("https://exämple.com/", "not valid"),
        ("https://[fe80::1%25eth0]/", "not valid"),
        ("https://example.com:22/", "ports"),
        ("https://example.com:80/", "ports"),
        ("https://example.com:0/", "ports"),
        ("https://example.com:65536/", "not valid"),
        ("https://example.com:x/", "not valid"),
        ("https://[::1/", "not valid"),
        ("https://example.com/" + "a" * 2048, "2048"),
        *((f"https://{host}/", "not public") for host in INSIDE),
    ],
)
def test_an_address_of_another_form_is_refused_for_good(url: str, reason: str) -> None:
    with pytest.raises(Blocked, match=reason) as refusal:
        check_target(url)
    assert refusal.value.is_final


def test_a_good_address_is_taken_apart() -> None:
    target = check_target("https://Example.com:8443/a/b?c=d&e#f")
    assert target == Target("https", "example.com", 8443, "/a/b?c=d&e")
    assert target.host_header == "example.com:8443"
    assert check_target("https://example.com").path == "/"
    assert check_target("https://[2606:4700:4700::1111]/").host_header == "[2606:4700:4700::1111]"


def test_for_development_http_and_any_port_are_allowed() -> None:
    target = check_target("http://localhost:5000/x", allow_private=True)
    assert target == Target("http", "localhost", 5000, "/x")
    with pytest.raises(Blocked):
        check_target("ftp://localhost/", allow_private=True)


def answering(*addresses: str) -> object:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return resolve


TARGET = Target("https", "example.com", 443, "/")


@pytest.mark.parametrize("others", [(), ("8.8.8.8",), ("2606:4700:4700::1111", "8.8.8.8")])
@pytest.mark.parametrize("closed", ["127.0.0.1", "::1", "::ffff:10.0.0.1", "169.254.169.254"])
async def test_one_closed_address_among_many_closes_the_name(
    closed: str, others: tuple[str, ...]
) -> None:
    for addresses in ((closed, *others), (*others, closed)):
        with pytest.raises(Blocked, match="not public") as refusal:
            await pin(TARGET, answering(*addresses))  # type: ignore[arg-type]
        assert closed not in str(refusal.value)
        assert not refusal.value.is_final and refusal.value.is_inside


async def test_all_addresses_are_returned_once_and_in_their_order() -> None:
    resolve = answering("8.8.8.8", "1.1.1.1", "8.8.8.8")
    assert await pin(TARGET, resolve) == ["8.8.8.8", "1.1.1.1"]  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1"])
async def test_spellings_of_loopback_are_closed_once_they_are_resolved(host: str) -> None:
    with pytest.raises(Blocked):
        await pin(Target("https", host, 443, "/"), resolve_by_system)


def test_a_public_address_and_any_name_pass() -> None:
    for host in ("8.8.8.8", "[2606:4700:4700::1111]", "127.0.0.1.example.com", "localhost.com"):
        assert check_target(f"https://{host}/")


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
async def test_a_name_that_cannot_be_resolved_may_be_tried_again(error: Exception) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise error

    with pytest.raises(Blocked, match="cannot be resolved") as refusal:
        await pin(TARGET, resolve)
    assert not refusal.value.is_final


async def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(Blocked, match="no address"):
        await pin(TARGET, answering())  # type: ignore[arg-type]


def test_a_url_that_passes_is_returned_as_it_is() -> None:
    url = "https://example.com:8443/a?b=c%20d"
    assert check_http_url(url) == url
