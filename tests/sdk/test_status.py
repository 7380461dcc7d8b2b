"""The snapshot that ``tidemill status`` shows."""

import redis

from support.fake_mill import KEYS, FakeMill
from support.twins import MakeTwin, Twin
from tidemill import QueueStatus


def test_an_empty_shard_has_nothing_to_show(producer: Twin, redis_client: redis.Redis) -> None:
    status = producer.status()
    assert (status.num_queued, status.num_running, status.num_dead_letters) == (0, 0, 0)
    assert (status.queues, status.workers, status.models) == ((), (), ())
    assert (status.scheduler_id, status.scheduler_epoch) == (None, 0)


def test_queues_workers_and_models_are_shown(
    make_twin: MakeTwin, redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    red, blue = (make_twin(redis_url, tenant=tenant) for tenant in ("red", "blue"))
    red.submit_many([[1], [2]], priority=-1)
    mill.claim()
    blue.submit([3], priority=5)
    red.submit([3])
    mill.report(num_running=1, free_blocks=99, prompt_tokens=10, cached_tokens=4)
    other = FakeMill(redis_client, model="n")
    dead = FakeMill(redis_client, model="n")
    redis_client.zadd(KEYS.workers, {dead.worker_id: 1})
    redis_client.xadd(KEYS.dead_letters, {"j": "x"})
    status = red.status()
    assert status.queued_by_tenant == {"blue": 1, "red": 2}
    assert status.running_by_tenant == {"red": 1}
    assert (status.num_queued, status.num_running, status.num_dead_letters) == (3, 1, 1)
    assert status.queues == (
        QueueStatus("p0", "red", 1),
        QueueStatus("p1", "red", 1),
        QueueStatus("p2", "blue", 1),
    )
    by_id = {worker.info.worker_id: worker for worker in status.workers}
    assert by_id.keys() == {mill.worker_id, other.worker_id}
    report = by_id[mill.worker_id].status
    assert report is not None and (report.num_running, report.free_blocks) == (1, 99)
    assert by_id[other.worker_id].status is None
    assert [card.name for card in status.models] == ["m", "n"]
    assert status.scheduler_id == "sch_test"
    assert status.scheduler_epoch >= 1
