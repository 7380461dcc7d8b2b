"""The daemon against a real server, with workers made of protocol calls."""

import json
import urllib.request
from functools import partial

import redis

from support.puppet_worker import PuppetWorker
from support.scheduler_process import LIVENESS_SECONDS, SchedulerProcess, StartScheduler
from support.shard import KEYS, QUEUE, cancel, submit
from support.wait import wait_until
from tidemill.protocol import calls
from tidemill.protocol.codec import encode
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import GenerateRequest


def state_of(client: redis.Redis, job_id: str) -> str:
    return (client.hget(KEYS.job(job_id), "st") or b"").decode()


def gather(*workers: PuppetWorker, num: int) -> None:
    """Let the workers work until they were given ``num`` jobs together."""

    def enough() -> bool:
        for worker in workers:
            worker.work_off()
        return sum(len(worker.claims) for worker in workers) >= num

    wait_until(enough, LIVENESS_SECONDS, f"not all of {num} jobs were dispatched")


def test_a_submitted_job_reaches_a_worker(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    worker = PuppetWorker(redis_client)

    job_id = submit(redis_client)

    claims = wait_until(worker.read, LIVENESS_SECONDS)
    assert [(claim.job_id, claim.fence) for claim in claims] == [(job_id, 1)]
    assert worker.finish(claims[0]).accepted


def test_jobs_that_waited_for_a_worker_are_dispatched_once_it_comes(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    ids = {submit(redis_client) for _ in range(5)}

    worker = PuppetWorker(redis_client)
    gather(worker, num=5)

    assert set(worker.job_ids) == ids


def test_every_job_goes_to_one_of_two_workers_once(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    workers = [PuppetWorker(redis_client, max_num_seqs=4) for _ in range(2)]
    ids = [submit(redis_client) for _ in range(60)]

    gather(*workers, num=60)

    assert sorted(workers[0].job_ids + workers[1].job_ids) == sorted(ids)
    assert workers[0].claims
    assert workers[1].claims
    wait_until(lambda: not redis_client.zcard(KEYS.active_queues), LIVENESS_SECONDS)
    assert not redis_client.exists(KEYS.ingress(QUEUE))
    assert not redis_client.zcard(KEYS.running)


def test_waiting_jobs_are_dispatched_in_prefix_order(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    keys = [bytes([label]) * 8 for label in (5, 1, 4, 1, 5, 2)]
    for key in keys:
        submit(redis_client, routing_key=key)
    wait_until(lambda: "p1" in str(redis_client.zrange(KEYS.active_queues, 0, -1)))
    pending = redis_client.xpending
    wait_until(lambda: pending(KEYS.ingress(QUEUE), "sched")["pending"] == 6, LIVENESS_SECONDS)

    worker = PuppetWorker(redis_client)
    gather(worker, num=6)

    given = [redis_client.hget(KEYS.job(job_id), "h") for job_id in worker.job_ids]
    assert given == sorted(keys)


def test_a_job_cancelled_in_the_queue_is_never_dispatched(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    cancelled, kept = submit(redis_client), submit(redis_client)
    pending = redis_client.xpending
    wait_until(lambda: pending(KEYS.ingress(QUEUE), "sched")["pending"] == 2, LIVENESS_SECONDS)
    assert cancel(redis_client, cancelled) == (1, "cancelled")

    worker = PuppetWorker(redis_client)
    gather(worker, num=1)
    later = submit(redis_client)
    gather(worker, num=2)

    assert worker.job_ids == [kept, later]
    assert state_of(redis_client, cancelled) == "cancelled"


def test_a_malformed_pointer_becomes_a_dead_letter_and_the_daemon_goes_on(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    worker = PuppetWorker(redis_client)
    submit(redis_client)
    gather(worker, num=1)
    stream = KEYS.ingress("p1:raw")
    redis_client.xadd(stream, {"j": "job_nonsense", "h": "", "c": 1, "m": "m", "a": 0, "p": 0})
    redis_client.zadd(KEYS.active_queues, {"p1:raw": 1})

    [(_, letter)] = wait_until(lambda: redis_client.xrange(KEYS.dead_letters), LIVENESS_SECONDS)

    assert letter[b"j"] == b"job_nonsense"
    assert letter[b"r"].startswith(b"malformed pointer: j: ")
    assert letter[b"q"] == b"p1:raw"
    wait_until(lambda: not redis_client.exists(stream), LIVENESS_SECONDS)
    job_id = submit(redis_client)
    gather(worker, num=2)
    assert worker.job_ids[-1] == job_id


def test_a_lost_consumer_group_is_made_again(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client)
    redis_client.xgroup_destroy(KEYS.ingress(QUEUE), "sched")

    worker = PuppetWorker(redis_client)
    gather(worker, num=1)

    assert worker.job_ids == [job_id]


def test_the_function_library_is_loaded_again_after_the_server_lost_everything(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    redis_client.flushall()
    redis_client.function_flush()
    wait_until(lambda: redis_client.function_list(), LIVENESS_SECONDS)

    worker = PuppetWorker(redis_client)
    job_id = submit(redis_client)
    gather(worker, num=1)

    assert worker.job_ids == [job_id]


def test_malformed_workers_and_statuses_do_not_stop_the_daemon(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    confused, worker = PuppetWorker(redis_client), PuppetWorker(redis_client)
    confused.report(last_command="not an entry id")
    redis_client.hset(KEYS.worker_info("wkr_impostor"), "info", encode(worker.info))
    redis_client.expire(KEYS.worker_info("wkr_impostor"), 60)
    far = 10**15
    redis_client.zadd(KEYS.workers, {b"\xff": far, "wkr_none": far, "wkr_impostor": far})
    redis_client.spublish(KEYS.bell, b"\xff")
    wait_until(lambda: "status of worker" in leader.log, LIVENESS_SECONDS)
    wait_until(lambda: "worker wkr_impostor cannot be used" in leader.log, LIVENESS_SECONDS)

    ids = [submit(redis_client) for _ in range(3)]
    gather(confused, worker, num=3)

    assert sorted(confused.job_ids + worker.job_ids) == sorted(ids)
    assert "starts over" not in leader.log


def test_an_expired_lease_sends_the_job_to_another_worker(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    dying = PuppetWorker(redis_client, lease_ms=2000)
    job_id = submit(redis_client)
    [first] = wait_until(dying.read, LIVENESS_SECONDS)
    assert dying.append(first, 0, 3).accepted

    heir = PuppetWorker(redis_client)
    [second] = wait_until(lambda: heir.report() or heir.read(), LIVENESS_SECONDS)

    assert (second.job_id, second.fence) == (job_id, 2)
    assert not dying.append(first, 3, 1).owned
    assert heir.append(second, 3, 1).accepted
    assert heir.finish(second, 4).accepted


def test_a_job_that_crashes_its_workers_is_declared_dead(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client)

    def crash_another() -> bool:
        dying = PuppetWorker(redis_client, lease_ms=900)
        wait_until(dying.read, LIVENESS_SECONDS)
        wait_until(lambda: state_of(redis_client, job_id) != "run", LIVENESS_SECONDS)
        return state_of(redis_client, job_id) == "dead"

    wait_until(crash_another, 3 * LIVENESS_SECONDS)

    [(_, letter)] = redis_client.xrange(KEYS.dead_letters)
    assert letter[b"j"] == job_id.encode()
    assert letter[b"a"] == b"3"


def was_tried(client: redis.Redis, job_id: str, attempt: int) -> bool:
    return client.hget(KEYS.job(job_id), "f") == str(attempt).encode()


def test_a_job_that_none_of_its_workers_has_read_is_not_declared_dead(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    job_id = submit(redis_client)

    for attempt in range(1, calls.MAX_CRASHES + 2):
        PuppetWorker(redis_client, lease_ms=900)
        wait_until(partial(was_tried, redis_client, job_id, attempt), LIVENESS_SECONDS)
        wait_until(lambda: state_of(redis_client, job_id) != "run", LIVENESS_SECONDS)

    heir = PuppetWorker(redis_client)
    gather(heir, num=1)
    assert heir.job_ids == [job_id]
    assert state_of(redis_client, job_id) == "done"


def test_a_job_that_kills_its_workers_takes_no_neighbour_with_it(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    neighbours = [submit(redis_client) for _ in range(4)]
    poison = submit(redis_client)
    neighbours += [submit(redis_client) for _ in range(4)]

    def serve_until_killed() -> bool:
        worker = PuppetWorker(redis_client, lease_ms=1000)

        def step() -> bool:
            claims = worker.read()
            if poison in worker.job_ids:
                return True
            for claim in claims:
                worker.finish(claim)
            worker.beat()
            worker.report()
            return state_of(redis_client, poison) == "dead"

        wait_until(step, LIVENESS_SECONDS)
        return state_of(redis_client, poison) == "dead"

    wait_until(serve_until_killed, 4 * LIVENESS_SECONDS)

    worker = PuppetWorker(redis_client)
    wait_until(
        lambda: (worker.work_off() and False) or set(redis_client.hkeys(KEYS.counters)) == {b"rb"},
        LIVENESS_SECONDS,
    )
    assert {state_of(redis_client, job_id) for job_id in neighbours} == {"done"}
    [(_, letter)] = redis_client.xrange(KEYS.dead_letters)
    assert letter[b"j"] == poison.encode()


def test_health_and_metrics_are_served(
    redis_client: redis.Redis, start_scheduler: StartScheduler
) -> None:
    scheduler = start_scheduler(options=("--metrics-port", "0"))

    def port() -> str:
        return scheduler.log.partition("metrics on port ")[2].partition("\n")[0]

    base = f"http://127.0.0.1:{wait_until(port, LIVENESS_SECONDS)}"
    worker = PuppetWorker(redis_client)
    submit(redis_client)
    gather(worker, num=1)
    with urllib.request.urlopen(f"{base}/healthz", timeout=30) as reply:
        health = json.load(reply)
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as reply:
        metrics = reply.read().decode()

    assert (health["ok"], health["role"], health["epoch"]) == (True, "leader", 1)
    assert "tidemill_scheduler_leader 1.0" in metrics
    assert "tidemill_scheduler_dispatched_total 1.0" in metrics
    assert "tidemill_scheduler_workers 1.0" in metrics


def test_a_job_for_another_model_does_not_hold_others_up(
    leader: SchedulerProcess, redis_client: redis.Redis
) -> None:
    worker = PuppetWorker(redis_client)
    run(redis_client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    request = GenerateRequest(model="unserved", prompt_ids=(1, 2), priority=-1)
    unserved = calls.NewJob(new_job_id(), request, cost=2)
    run(redis_client, calls.submit(KEYS, unserved))
    job_id = submit(redis_client)

    gather(worker, num=1)

    assert worker.job_ids == [job_id]
    assert cancel(redis_client, unserved.job_id) == (1, "cancelled")
