"""Ids and key names."""

import pytest

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.ids import new_job_id, new_ulid, shard_for_tenant, shard_of
from tidemill.protocol.keys import ShardKeys, is_permanent, keys_of
from tidemill.protocol.states import ALLOWED_MOVES, TERMINAL_STATES, JobState


def test_ulids_sort_by_time_and_do_not_repeat() -> None:
    early, late = new_ulid(now_ms=1), new_ulid(now_ms=2)
    assert early < late
    assert len({new_ulid(now_ms=1) for _ in range(1000)}) == 1000


def test_a_ulid_of_a_known_time_begins_with_its_published_encoding() -> None:
    # From the ULID specification's example: 1469918176385 ms -> 01ARYZ6S41.
    assert new_ulid(now_ms=1469918176385).startswith("01ARYZ6S41")


def test_a_job_id_names_its_shard() -> None:
    assert shard_of(new_job_id("3f")) == "3f"
    assert ShardKeys("3f") == keys_of(new_job_id("3f"))


@pytest.mark.parametrize("job_id", ["", "job_", "job_zz" + "0" * 26, "job_00" + "I" * 26, "x" * 32])
def test_what_is_not_a_job_id_is_refused(job_id: str) -> None:
    with pytest.raises(InvalidRequest, match="job_id"):
        shard_of(job_id)


def test_the_shard_of_a_tenant_is_its_crc16_xmodem() -> None:
    # Published check value of CRC-16/XMODEM: "123456789" -> 0x31c3.
    assert f"{0x31C3 % 64:02x}" == shard_for_tenant("123456789", num_shards=64)


def test_all_keys_of_a_shard_share_one_hash_tag() -> None:
    keys = ShardKeys("0a")
    names = [keys.job("x"), keys.running, keys.ingress("p1:t"), keys.model("m"), keys.bell]
    assert all(name.startswith("tm:{0a}:") for name in names)


def test_only_listed_keys_may_live_for_ever() -> None:
    keys = ShardKeys()
    assert is_permanent(keys.salts.encode())
    assert is_permanent(keys.ingress("p0:t").encode())
    assert not is_permanent(keys.job("x").encode())
    assert not is_permanent(b"anything")


def test_a_terminal_state_has_no_way_out() -> None:
    assert all(not ALLOWED_MOVES[state] for state in TERMINAL_STATES)
    assert set(JobState) == set(ALLOWED_MOVES)
