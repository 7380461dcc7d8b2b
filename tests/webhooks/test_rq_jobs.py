"""The queue in RQ: it runs what is ours, and nothing else."""

import asyncio
import io
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import redis
from rq import Callback, Queue, Retry
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from support import shard
from support.hook_sink import HookSink
from support.shard import KEYS
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.messages import JobTerms
from tidemill.service.config import WebhookConfig
from tidemill.service.redis import connect, connect_async
from tidemill_webhooks.__main__ import serve
from tidemill_webhooks.admin import HookAdmin
from tidemill_webhooks.config import WorkerConfig, queue_url, worker_config
from tidemill_webhooks.outbox import Outbox
from tidemill_webhooks.rq_jobs import DELIVER, QUEUE_NAME, HookQueue, SafeJob, make_queue
from tidemill_webhooks.settings import DeliverySettings


@pytest.fixture
def rq_client(redis_url: str, redis_client: redis.Redis) -> Iterator[redis.Redis]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def config(redis_url: str) -> WorkerConfig:
    return WorkerConfig(redis_url, redis_url, ("00",), DeliverySettings(allow_private=True))


def post_one(client: redis.Redis, url: str, admin: HookAdmin, callback_url: str) -> str:
    """A delivery that is due."""
    job_id = shard.submit(client, terms=JobTerms(callback_url=callback_url))
    shard.finish(client, job_id, shard.dispatch(client, job_id, shard.lead(client)).fence, 0)
    asyncio.run(work_off(url))
    return next(admin.deliveries()).delivery_id


async def work_off(url: str) -> None:
    async with connect_async(url) as client:
        await Outbox(client, KEYS).work_off()


def test_a_worker_delivers_what_was_put_into_the_queue(
    redis_client: redis.Redis,
    redis_url: str,
    admin: HookAdmin,
    sink: HookSink,
    config: WorkerConfig,
) -> None:
    delivery = post_one(redis_client, redis_url, admin, sink.url)
    queue = HookQueue(redis_url)
    for _ in range(2):
        queue.put("00", delivery, 0, 0)
    queue.put("00", delivery, 0, 1)
    assert redis_client.llen("tm:rq:queue:webhooks") == 2
    serve(config, burst=True)
    queue.close()
    assert len(sink.received) == 1
    found = admin.delivery(delivery)
    assert found is not None and found.state == "delivered"
    assert redis_client.zcard(KEYS.hook_workers) == 0
    assert not list(redis_client.scan_iter("tm:rq:job:*")), "what has run leaves nothing"


def test_jobs_are_stored_as_json_with_ids_alone(redis_client: redis.Redis, redis_url: str) -> None:
    queue = HookQueue(redis_url)
    queue.put("00", "evt_1-we_1", 3, 1)
    queue.close()
    [key] = redis_client.scan_iter("tm:rq:job:*")
    assert key == b"tm:rq:job:wh-evt_1-we_1-3-1"
    job = SafeJob.fetch("wh-evt_1-we_1-3-1", redis_client, serializer=JSONSerializer)
    assert (job.func_name, tuple(job.args), job.kwargs) == (DELIVER, ("00", "evt_1-we_1"), {})
    assert job.description == "webhook" and job.result_ttl == 0
    assert job.timeout == 40 and job.failure_ttl == 14 * 24 * 3600


@pytest.mark.parametrize("function", ["os.system", "os.mkdir", "tidemill_webhooks.rq_jobs.connect"])
def test_a_function_that_is_not_listed_is_not_run(
    rq_client: redis.Redis, config: WorkerConfig, tmp_path: os.PathLike[str], function: str
) -> None:
    made = os.path.join(tmp_path, "made")
    argument = made if function == "os.mkdir" else f"touch {made}"
    foreign = Queue(QUEUE_NAME, connection=rq_client, serializer=JSONSerializer)
    job = foreign.enqueue(function, argument, retry=Retry(max=1))
    serve(config, burst=True)
    assert not os.path.exists(made)
    assert job.get_status(refresh=True).value == "failed"


def test_callbacks_and_webhooks_of_rq_are_not_run(
    rq_client: redis.Redis, config: WorkerConfig, tmp_path: os.PathLike[str], sink: HookSink
) -> None:
    made = os.path.join(tmp_path, "made")
    foreign = Queue(QUEUE_NAME, connection=rq_client, serializer=JSONSerializer)
    foreign.enqueue(
        DELIVER,
        args=("00", made),
        on_success=Callback("os.mkdir"),
        on_failure=Callback("os.mkdir"),
        webhooks=[Webhook(sink.url, "finished"), Webhook(sink.url, "failed")],
    )
    serve(config, burst=True)
    assert make_queue(rq_client).jobs == [] and not sink.received
    assert not os.path.exists(made)


def test_a_method_of_an_object_is_not_run(rq_client: redis.Redis) -> None:
    job = SafeJob.create(DELIVER, args=("00", "d"), connection=rq_client, serializer=JSONSerializer)
    job.instance = "some object"
    with pytest.raises(Exception, match="may not be run"):
        _ = job.func


class RaisingLog(io.StringIO):
    """A log where a signal comes in the middle of a line; its handler catches what that raises."""

    def write(self, text: str) -> int:
        if "cleaning registries" in text:
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


def test_a_worker_leaves_although_the_exception_of_its_signal_was_lost(
    config: WorkerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    handler = logging.StreamHandler(RaisingLog())
    log = logging.getLogger("rq.worker")
    previous = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    log.addHandler(handler)
    try:
        serve(config)
    finally:
        log.removeHandler(handler)
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])
    assert "warm shut down requested" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_cluster_needs_a_server_of_its_own_for_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = "redis+cluster://localhost:7300"
    none = WebhookConfig(rq_url=None, secret="", allow_private=False)
    own = WebhookConfig(rq_url="redis://localhost:1/0", secret="", allow_private=False)
    assert queue_url(none, cluster) is None and queue_url(own, cluster) == own.rq_url
    assert queue_url(none, "redis://localhost:2/0") == "redis://localhost:2/0"
    monkeypatch.delenv("TIDEMILL_RQ_URL", raising=False)
    with pytest.raises(ConfigError, match="cluster"):
        worker_config(["--redis-url", cluster])
    monkeypatch.setenv("TIDEMILL_RQ_URL", "redis://localhost:1/0")
    assert worker_config(["--redis-url", cluster]).rq_url == "redis://localhost:1/0"
