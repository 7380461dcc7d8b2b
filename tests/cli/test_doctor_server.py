"""What ``tidemill doctor`` makes of a server's own words."""

from typing import Any

import pytest

from tidemill.protocol.functions import LUA_SOURCE
from tidemill.service.diagnosis.server import ServerFacts, check_server_facts

INFO: dict[str, Any] = {
    "valkey_version": "9.1.2",
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory": 1000,
    "used_memory": 100,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}
CONFIG = {
    "appendonly": "yes",
    "appendfsync": "always",
    "client-output-buffer-limit": "normal 0 0 0 slave 1 1 60 pubsub 33554432 8388608 60",
}


def level_of(
    check: str, info: dict[str, Any] | None = None, config: dict[str, str] | None = CONFIG
) -> str:
    facts = ServerFacts({**INFO, **(info or {})}, config, {"tm2": LUA_SOURCE}, 0.0)
    [finding] = [f for f in check_server_facts(facts) if f.check == check]
    return finding.level


@pytest.mark.parametrize(
    ("check", "info", "level"),
    [
        ("server", {}, "ok"),
        ("server", {"redis_version": "6.2.14"}, "failure"),
        ("server", {"role": "slave"}, "failure"),
        ("eviction", {"maxmemory_policy": "allkeys-lru"}, "failure"),
        ("eviction", {"maxmemory_policy": "allkeys-lru", "maxmemory": 0}, "warning"),
        ("memory", {}, "ok"),
        ("memory", {"maxmemory": 0}, "warning"),
        ("memory", {"used_memory": 800}, "warning"),
        ("memory", {"used_memory": 950}, "failure"),
        ("durability", {}, "ok"),
        ("durability", {"aof_enabled": 0}, "failure"),
        ("durability", {"aof_last_write_status": "err"}, "failure"),
    ],
)
def test_the_server_is_judged_by_what_it_says(check: str, info: dict[str, Any], level: str) -> None:
    assert level_of(check, info) == level


@pytest.mark.parametrize(
    ("check", "config", "level"),
    [
        ("durability", {"appendonly": "yes", "appendfsync": "everysec"}, "warning"),
        ("durability", {"appendonly": "yes", "appendfsync": "no"}, "warning"),
        ("durability", None, "warning"),
        ("pub/sub buffer", CONFIG, "ok"),
        ("pub/sub buffer", {"client-output-buffer-limit": "pubsub 0 0 0"}, "warning"),
        ("pub/sub buffer", {"client-output-buffer-limit": "pubsub 1000 0 0"}, "warning"),
        ("pub/sub buffer", None, "ok"),
    ],
)
def test_a_configuration_is_judged_and_a_hidden_one_is_no_failure(
    check: str, config: dict[str, str] | None, level: str
) -> None:
    assert level_of(check, config=config) == level
