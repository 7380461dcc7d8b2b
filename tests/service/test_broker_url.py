"""Addresses of Sentinel groups and clusters, taken apart."""

import pytest

from tidemill.protocol.errors import ConfigError
from tidemill.service.broker_url import (
    Address,
    is_cluster,
    is_routed,
    parse_routed_url,
    redact,
)


def test_a_sentinel_address_names_sentinels_master_and_database() -> None:
    url = "redis+sentinel://tide:p%40ss%2F1@one:26380,two,[::1]:7/mill/3?socket_timeout=2"
    parsed = parse_routed_url(url)
    assert parsed.seeds == (Address("one", 26380), Address("two", 26379), Address("::1", 7))
    assert (parsed.master, parsed.is_tls) == ("mill", False)
    assert parsed.options == {
        "username": "tide",
        "password": "p@ss/1",
        "db": 3,
        "socket_timeout": 2.0,
    }


def test_sentinels_get_their_own_credentials_only() -> None:
    query = "?sentinel_username=watch&sentinel_password=s%26&ssl_ca_certs=/ca.pem"
    parsed = parse_routed_url(f"rediss+sentinel://tide:pw@one/mill{query}")
    assert parsed.is_tls
    assert parsed.options == {"username": "tide", "password": "pw", "ssl_ca_certs": "/ca.pem"}
    assert parsed.seed_options == {
        "username": "watch",
        "password": "s&",
        "db": 0,
        "ssl_ca_certs": "/ca.pem",
    }
    without = parse_routed_url("redis+sentinel://tide:pw@one/mill")
    assert without.seed_options == {"username": None, "password": None, "db": 0}


def test_the_nodes_of_a_cluster_are_asked_as_the_user_who_works_there() -> None:
    parsed = parse_routed_url("redis+cluster://tide:pw@one:7000,two/0")
    assert parsed.seeds == (Address("one", 7000), Address("two", 6379))
    assert parsed.master == ""
    assert parsed.options["password"] == parsed.seed_options["password"] == "pw"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://one", "must end in /master-name"),
        ("redis+sentinel://one/", "must end in /master-name"),
        ("redis+sentinel://one/mill/two", "must end in /master-name"),
        ("redis+sentinel:///mill", "'' is not host:port"),
        ("redis+sentinel://one,,two/mill", "'' is not host:port"),
        ("redis+sentinel://one:port/mill", "'one:port' is not host:port"),
        ("redis+sentinel://one:70000/mill", "'one:70000' is not host:port"),
        ("redis+sentinel://[::1/mill", "'[::1' is not host:port"),
        ("redis+sentinel://u:secret@one/mill?socket_timeout=x", "'socket_timeout'"),
        ("redis+cluster://u:secret@one/1", "a cluster has no database '1'"),
        ("redis+cluster://u:secret@", "'' is not host:port"),
    ],
)
def test_a_wrong_address_is_told_with_its_reason_and_form(url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_routed_url(url)
    assert reason in refused.value.message and "secret" not in refused.value.one_line()
    kind = "cluster" if is_cluster(url) else "sentinel"
    assert f"redis+{kind}://[user:password@]" in refused.value.fix


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///s", "ftp://h", ""])
def test_other_addresses_are_left_to_redis_py(url: str) -> None:
    assert not is_routed(url) and not is_cluster(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis+sentinel://u:p@one:1,two:2/mill?sentinel_password=p", "one:1,two:2/mill"),
        ("rediss+cluster://:pa/s?s@one:1,two:2", "one:1,two:2"),
        ("redis+cluster://:p@ss@one", "one"),
    ],
)
def test_no_part_of_a_password_is_shown_even_if_it_was_not_encoded(url: str, shown: str) -> None:
    scheme = url.partition("://")[0]
    assert redact(url) == f"{scheme}://***@{shown}"
