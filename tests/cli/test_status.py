"""``tidemill status``."""

import json
from collections.abc import Callable

import pytest
import redis
from click.testing import Result as Outcome

from support.fake_mill import KEYS, FakeMill

Tidemill = Callable[..., Outcome]


@pytest.mark.leaks_keys
def test_a_damaged_shard_is_shown_with_notes(
    tidemill: Tidemill, mill: FakeMill, redis_client: redis.Redis
) -> None:
    counts = {b"q:red": "abc", b"q:[/blue]": 2, b"q:\xff": 1}
    redis_client.hset(KEYS.counters, mapping=counts)
    redis_client.hset(KEYS.measures, "lv", "[/]")
    redis_client.set(KEYS.leader, b"[/]\xff")
    redis_client.zadd(KEYS.workers, {b"\xff": 9e15})

    shown = tidemill("status")
    told = json.loads(tidemill("status", "--json").stdout)

    assert shown.exit_code == 0, shown.exception
    assert '"q:red" = "abc"' in shown.stdout and "[/blue]" in shown.stdout
    assert mill.worker_id in shown.stdout
    assert told["num_queued"] == 3 and len(told["notes"]) == 2


@pytest.mark.leaks_keys
@pytest.mark.parametrize(
    ("kv", "told"), [(None, "-"), ({"num_blocks": 100, "block_size": 16}, "25% of 100")]
)
def test_a_worker_without_a_kv_cache_shows_no_blocks_of_one(
    tidemill: Tidemill, mill: FakeMill, kv: dict[str, int] | None, told: str
) -> None:
    mill.report(free_blocks=75, kv=kv)
    [row] = [line for line in tidemill("status").stdout.splitlines() if mill.worker_id in line]
    assert row.strip("│").split("│")[4].strip() == told
