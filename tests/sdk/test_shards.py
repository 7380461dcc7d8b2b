"""Which shard a client submits to, and that it reaches the jobs of the others."""

import pytest
import redis

from support.fake_mill import FakeMill
from support.twins import MakeTwin, Twin
from tidemill import ConfigError, JobNotFound
from tidemill._endpoint import find_endpoint
from tidemill.protocol.ids import new_job_id


def test_a_shard_is_the_tenants_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def shard(given: str | None = None) -> str:
        return find_endpoint(None, "123456789", given).keys.shard

    assert shard() == "00"
    monkeypatch.setenv("TIDEMILL_SHARDS", "256")
    # The low byte of the tenant's CRC-16, 0x31c3.
    assert shard() == "c3"
    monkeypatch.setenv("TIDEMILL_SHARD", "07")
    assert shard() == "07"
    assert shard("0a") == "0a"


@pytest.mark.parametrize("shard", ["", "7", "0A", "000"])
def test_what_names_no_shard_is_refused(make_twin: MakeTwin, shard: str) -> None:
    with pytest.raises(ConfigError, match="two lower-case hexadecimal digits"):
        make_twin("redis://127.0.0.1:1", shard=shard)


def test_one_server_holds_all_shards_on_one_connection(
    make_twin: MakeTwin, mill: FakeMill, redis_url: str, redis_client: redis.Redis, producer: Twin
) -> None:
    elsewhere = make_twin(redis_url, shard="05")
    job_id = producer.submit([1]).id
    mill.claim().finish(2)
    assert elsewhere.result(job_id, 5).token_ids == (0, 1)
    assert [chunk.ids for chunk in elsewhere.stream(job_id)] == [(0, 1)]
    with pytest.raises(JobNotFound):
        elsewhere.job_status(new_job_id("05"))
