"""Each Redis Function by itself, against a real server."""

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls
from tidemill.protocol.codec import decode
from tidemill.protocol.errors import (
    IdempotencyConflict,
    QueueFull,
    StaleEpoch,
)
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import (
    JobEnd,
    JobResult,
    ModelCard,
    Usage,
    WorkerInfo,
    WorkerStatus,
)

pytestmark = pytest.mark.leaks_keys


def state(client: redis.Redis, job_id: str) -> str:
    return (client.hget(KEYS.job(job_id), "st") or b"gone").decode()


def counters(client: redis.Redis) -> dict[bytes, bytes]:
    """The counters of jobs; those of tokens and bytes have tests of their own."""
    counts = client.hgetall(KEYS.counters)
    return {name: count for name, count in counts.items() if name[:2] in (b"q:", b"r:")}


def test_submitting_the_same_id_again_creates_one_job(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    again = shard.submit(redis_client, job_id)
    assert again == job_id
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 1
    assert counters(redis_client) == {b"q:default": b"1"}


def test_an_idempotency_key_returns_the_first_job(redis_client: redis.Redis) -> None:
    first = shard.submit(redis_client, idempotency_key="k", body_digest="abc")
    second = shard.submit(redis_client, idempotency_key="k", body_digest="abc")
    assert second == first
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 1


def test_an_idempotency_key_with_another_body_is_a_conflict(redis_client: redis.Redis) -> None:
    first = shard.submit(redis_client, idempotency_key="k", body_digest="abc")
    with pytest.raises(IdempotencyConflict, match=first):
        shard.submit(redis_client, idempotency_key="k", body_digest="xyz")
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 1


def test_a_full_queue_refuses_and_stores_nothing(redis_client: redis.Redis) -> None:
    shard.submit(redis_client, max_queued=1)
    refused = new_job_id()
    with pytest.raises(QueueFull):
        shard.submit(redis_client, refused, max_queued=1)
    assert not redis_client.exists(KEYS.job(refused))


def test_a_server_out_of_memory_refuses_submits_and_lets_running_jobs_end(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    limit = redis_client.config_get("maxmemory")["maxmemory"]
    redis_client.config_set("maxmemory", 1_000_000)
    try:
        with pytest.raises(QueueFull):
            shard.submit(redis_client)
        fence = shard.dispatch(redis_client, job_id, epoch).fence
        status = WorkerStatus(num_running=1)
        assert run(redis_client, calls.report(KEYS, worker_id="wkr_a", status=status))
        assert shard.claim(redis_client, job_id, fence)
        assert shard.append(redis_client, job_id, fence, 0, 2).accepted
        assert shard.finish(redis_client, job_id, fence, 2).accepted
    finally:
        redis_client.config_set("maxmemory", limit)


def test_the_first_salt_of_a_tenant_stays(redis_client: redis.Redis) -> None:
    first = run(redis_client, calls.salt(KEYS, tenant="t", random=b"a" * 16))
    assert run(redis_client, calls.salt(KEYS, tenant="t", random=b"b" * 16)) == first == b"a" * 16
    assert run(redis_client, calls.salt(KEYS, tenant="u", random=b"b" * 16)) == b"b" * 16


def test_only_one_scheduler_leads_and_a_new_one_counts_up_the_epoch(
    redis_client: redis.Redis,
) -> None:
    first = shard.lead(redis_client, "sch_1")
    assert shard.lead(redis_client, "sch_1") == first
    assert shard.lead(redis_client, "sch_2") == 0
    run(redis_client, calls.resign(KEYS, scheduler_id="sch_2"))
    assert shard.lead(redis_client, "sch_2") == 0
    run(redis_client, calls.resign(KEYS, scheduler_id="sch_1"))
    assert shard.lead(redis_client, "sch_2") == first + 1


def test_a_deposed_scheduler_dispatches_nothing(redis_client: redis.Redis) -> None:
    old = shard.lead(redis_client, "sch_1")
    job_id = shard.submit(redis_client)
    run(redis_client, calls.resign(KEYS, scheduler_id="sch_1"))
    shard.lead(redis_client, "sch_2")
    with pytest.raises(StaleEpoch):
        shard.dispatch(redis_client, job_id, old)
    assert state(redis_client, job_id) == "queued"


def test_dispatch_hands_a_job_over_once(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    [(pointed, _)] = shard.read_pointers(redis_client)
    assert pointed == job_id
    first = shard.dispatch(redis_client, job_id, epoch, "wkr_a")
    again = shard.dispatch(redis_client, job_id, epoch, "wkr_b")
    assert (first.fence, again.fence) == (1, 0)
    assert (again.state, again.worker_id) == ("run", "wkr_a")
    assert redis_client.xlen(KEYS.commands("wkr_a")) == 1
    assert redis_client.xlen(KEYS.commands("wkr_b")) == 0
    assert redis_client.xpending(KEYS.ingress(QUEUE), "sched")["pending"] == 0
    assert counters(redis_client) == {b"r:default": b"1"}


def test_an_append_whose_reply_was_lost_is_not_written_twice(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    assert shard.append(redis_client, job_id, fence, 0, 3).accepted
    repeated = shard.append(redis_client, job_id, fence, 0, 3)
    assert not repeated.accepted and repeated.owned and repeated.num_tokens == 3
    assert shard.read_log(redis_client, job_id).ids == [0, 1, 2]


def test_a_stale_claimant_can_neither_append_nor_finish(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    old = shard.dispatch(redis_client, job_id, epoch, "wkr_a").fence
    shard.expire_lease(redis_client, job_id)
    assert shard.reap(redis_client, job_id) == 1
    new = shard.dispatch(redis_client, job_id, epoch, "wkr_b").fence
    for fence, owned in ((old, False), (new, True)):
        assert shard.append(redis_client, job_id, fence, 0, 1, "wkr_b").owned == owned
    assert not shard.finish(redis_client, job_id, old, 1, worker="wkr_b").accepted
    assert shard.read_log(redis_client, job_id).writers == [new]


def test_the_server_itself_refuses_a_write_below_a_newer_fence(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    shard.dispatch(redis_client, job_id, epoch)
    shard.expire_lease(redis_client, job_id)
    shard.reap(redis_client, job_id)
    shard.dispatch(redis_client, job_id, epoch)
    with pytest.raises(redis.ResponseError, match="equal or smaller"):
        redis_client.xadd(KEYS.token_log(job_id), {"s": "0"}, id="1-5")


def test_one_job_that_is_gone_does_not_stop_its_neighbours_tokens(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    alive, gone = shard.submit(redis_client), shard.submit(redis_client)
    fences = {job: shard.dispatch(redis_client, job, epoch).fence for job in (alive, gone)}
    shard.cancel(redis_client, gone, "wkr_a")
    chunks = [(job, fences[job], shard.make_chunk(0, 1)) for job in (gone, alive)]
    written = run(redis_client, calls.append(KEYS, worker_id="wkr_a", chunks=chunks))
    assert [w.accepted for w in written] == [False, True]


def test_an_error_inside_one_append_leaves_the_others_written(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    good, broken = shard.submit(redis_client), shard.submit(redis_client)
    for job in (good, broken):
        shard.dispatch(redis_client, job, epoch)
    redis_client.delete(KEYS.token_log(broken))
    redis_client.set(KEYS.token_log(broken), "not a stream")
    chunks = [(job, 1, shard.make_chunk(0, 1)) for job in (broken, good)]
    first, second = run(redis_client, calls.append(KEYS, worker_id="wkr_a", chunks=chunks))
    assert not first.accepted and first.owned and first.num_tokens is None
    assert second.accepted


def test_finish_seals_the_log_and_keeps_the_last_tokens(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client, idempotency_key="k", body_digest="b")
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    shard.append(redis_client, job_id, fence, 0, 2)
    assert shard.finish(redis_client, job_id, fence, 2, 1).accepted
    log = shard.read_log(redis_client, job_id)
    assert (log.ids, log.terminals) == ([0, 1, 2], ["done"])
    with pytest.raises(redis.ResponseError, match="equal or smaller"):
        redis_client.xadd(KEYS.token_log(job_id), {"s": "9"}, id="77-9")
    result = decode(redis_client.hget(KEYS.job(job_id), "res") or b"", JobResult)
    assert result.ids == (0, 1, 2)
    assert not redis_client.hexists(KEYS.job(job_id), "req")
    assert counters(redis_client) == {}
    assert not redis_client.zcard(KEYS.running)


def test_a_finish_whose_reply_was_lost_reports_the_state_it_made(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    shard.finish(redis_client, job_id, fence, 0, 1)
    again = shard.finish(redis_client, job_id, fence, 0, 1)
    assert not again.accepted and again.state == "done"
    assert shard.read_log(redis_client, job_id).terminals == ["done"]


def test_finish_at_the_wrong_position_changes_nothing(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    refused = shard.finish(redis_client, job_id, fence, 4, 1)
    assert refused.owned and refused.num_tokens == 0
    assert state(redis_client, job_id) == "run"


def test_a_job_cancelled_in_the_queue_is_never_dispatched(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    [(_, entry)] = shard.read_pointers(redis_client)
    assert shard.cancel(redis_client, job_id) == (1, "cancelled")
    assert shard.cancel(redis_client, job_id) == (0, "cancelled")
    late = run(
        redis_client,
        calls.dispatch(
            KEYS,
            job_id=job_id,
            queue=QUEUE,
            entry_id=entry,
            worker_id="wkr_a",
            epoch=epoch,
            lease_ms=1000,
        ),
    )
    assert (late.fence, late.state) == (0, "cancelled")
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 0
    assert shard.read_log(redis_client, job_id).terminals == ["cancelled"]


def test_cancelling_a_running_job_keeps_its_tokens_and_tells_its_worker(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    shard.append(redis_client, job_id, fence, 0, 2)
    assert shard.cancel(redis_client, job_id, "wkr_other") == (-2, "wkr_a")
    assert shard.cancel(redis_client, job_id, "wkr_a") == (1, "cancelled")
    commands = [fields[b"k"] for _, fields in redis_client.xrange(KEYS.commands("wkr_a"))]
    assert commands == [b"run", b"cancel"]
    assert not shard.append(redis_client, job_id, fence, 2, 1).owned
    assert shard.read_log(redis_client, job_id).ids == [0, 1]


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_what_ends_without_its_worker_has_used_its_prompt_if_a_worker_had_it(
    redis_client: redis.Redis, num_tokens: int
) -> None:
    epoch = shard.lead(redis_client)
    waiting, running, late = (shard.submit(redis_client) for _ in range(3))
    for job_id in (running, late):
        fence = shard.dispatch(redis_client, job_id, epoch).fence
        if num_tokens:
            shard.append(redis_client, job_id, fence, 0, num_tokens)
    redis_client.hset(KEYS.job(late), "dl", 1)
    redis_client.zadd(KEYS.due, {late: 1})
    shard.cancel(redis_client, waiting)
    shard.cancel(redis_client, running, "wkr_a")
    assert shard.expire(redis_client, late, "wkr_a") == "deadline"
    used = Usage(prompt_tokens=3, completion_tokens=num_tokens)
    for job_id, state, usage in (
        (waiting, "cancelled", Usage()),
        (running, "cancelled", used),
        (late, "expired", used),
    ):
        [(_, fields)] = redis_client.xrevrange(KEYS.token_log(job_id), count=1)
        end = decode(fields[b"e"], JobEnd)
        assert (end.state, end.usage) == (state, usage)


def test_cancelling_an_unknown_job_says_so(redis_client: redis.Redis) -> None:
    assert shard.cancel(redis_client, new_job_id()) == (-1, "gone")


def test_a_job_whose_lease_still_runs_is_not_reaped(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    shard.dispatch(redis_client, job_id, epoch)
    assert shard.reap(redis_client, job_id) == 0
    assert state(redis_client, job_id) == "run"


def test_reaping_does_not_touch_a_job_that_finished_meanwhile(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    shard.finish(redis_client, job_id, fence, 0, 1)
    redis_client.zadd(KEYS.running, {job_id: 1})
    assert shard.reap(redis_client, job_id) == 0
    assert state(redis_client, job_id) == "done"


def test_a_job_that_crashes_its_workers_three_times_is_dead(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    outcomes = []
    for _ in range(3):
        fence = shard.dispatch(redis_client, job_id, epoch).fence
        assert shard.claim(redis_client, job_id, fence)
        shard.expire_lease(redis_client, job_id)
        outcomes.append(shard.reap(redis_client, job_id))
    assert outcomes == [1, 1, 2]
    assert state(redis_client, job_id) == "dead"
    assert redis_client.xlen(KEYS.dead_letters) == 1
    assert counters(redis_client) == {}


def test_an_attempt_that_no_worker_read_is_no_crash(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    for _ in range(5):
        shard.dispatch(redis_client, job_id, epoch)
        shard.expire_lease(redis_client, job_id)
        assert shard.reap(redis_client, job_id) == 1
    assert state(redis_client, job_id) == "queued"


def test_only_the_worker_of_the_current_attempt_can_claim_it(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    assert not shard.claim(redis_client, job_id, 0)
    fence = shard.dispatch(redis_client, job_id, epoch, "wkr_a").fence
    assert not shard.claim(redis_client, job_id, fence, "wkr_b")
    assert not shard.claim(redis_client, job_id, fence + 1, "wkr_a")
    assert shard.claim(redis_client, job_id, fence, "wkr_a")
    assert shard.claim(redis_client, job_id, fence, "wkr_a")


def test_an_unreadable_pointer_becomes_one_dead_letter(redis_client: redis.Redis) -> None:
    job_id = shard.submit(redis_client)
    [(_, entry)] = shard.read_pointers(redis_client)
    call = calls.bury(KEYS, queue=QUEUE, entry_id=entry, job_id=b"x", reason="odd")
    assert [run(redis_client, call) for _ in range(2)] == [True, False]
    assert redis_client.xlen(KEYS.ingress(QUEUE)) == 0
    [(_, letter)] = redis_client.xrange(KEYS.dead_letters)
    assert (letter[b"r"], letter[b"e"]) == (b"odd", entry.encode())
    assert state(redis_client, job_id) == "queued"


def test_crashes_that_made_progress_do_not_count_as_poison(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    for attempt in range(6):
        fence = shard.dispatch(redis_client, job_id, epoch).fence
        assert shard.append(redis_client, job_id, fence, attempt, 1).accepted
        shard.expire_lease(redis_client, job_id)
        assert shard.reap(redis_client, job_id) == 1
    assert shard.read_log(redis_client, job_id).writers == [1, 2, 3, 4, 5, 6]


def test_a_released_job_waits_again_and_its_old_worker_is_fenced(redis_client: redis.Redis) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    release = calls.release(KEYS, job_id=job_id, fence=fence, worker_id="wkr_a", queue=QUEUE)
    assert run(redis_client, release)
    assert not run(redis_client, release)
    assert not shard.append(redis_client, job_id, fence, 0, 1).owned
    assert counters(redis_client) == {b"q:default": b"1"}
    assert len(shard.read_pointers(redis_client)) == 1


def test_a_queue_with_entries_is_not_retired_and_an_empty_one_leaves_nothing(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    job_id = shard.submit(redis_client)
    assert not run(redis_client, calls.retire(KEYS, QUEUE))
    shard.dispatch(redis_client, job_id, epoch)
    assert run(redis_client, calls.retire(KEYS, QUEUE))
    assert not redis_client.exists(KEYS.ingress(QUEUE), KEYS.active_queues)


def register(client: redis.Redis) -> None:
    info = WorkerInfo(
        worker_id="wkr_a",
        model="m",
        num_blocks=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        wire_version=1,
    )
    card = ModelCard(
        name="m", revision="r", tokenizer_digest="t", max_model_len=128, vocab_size=100
    )
    run(client, calls.register(KEYS, info=info, card=card, tokenizer=b"z", lease_ms=1000))


def beat(client: redis.Redis, *jobs: tuple[str, int]) -> calls.Beat:
    return run(
        client,
        calls.beat(
            KEYS, worker_id="wkr_a", model="m", tokenizer_digest="t", lease_ms=60_000, jobs=jobs
        ),
    )


def test_a_beat_renews_leases_and_names_the_jobs_that_were_lost(redis_client: redis.Redis) -> None:
    register(redis_client)
    epoch = shard.lead(redis_client)
    kept, lost = shard.submit(redis_client), shard.submit(redis_client)
    for job in (kept, lost):
        shard.dispatch(redis_client, job, epoch, lease_ms=1000)
    before = redis_client.zscore(KEYS.running, kept) or 0
    shard.cancel(redis_client, lost, "wkr_a")
    reply = beat(redis_client, (kept, 1), (lost, 1))
    assert reply == calls.Beat(registered=True, lost=(lost,))
    assert (redis_client.zscore(KEYS.running, kept) or 0) > before
    assert redis_client.zscore(KEYS.running, lost) is None


def test_a_beat_after_the_registration_is_gone_asks_for_a_new_one(
    redis_client: redis.Redis,
) -> None:
    assert not beat(redis_client).registered
    register(redis_client)
    assert beat(redis_client).registered
    redis_client.delete(KEYS.tokenizer("t"))
    assert not beat(redis_client).registered


def test_only_the_leader_of_the_epoch_refuses_a_job_and_only_while_it_waits(
    redis_client: redis.Redis,
) -> None:
    epoch = shard.lead(redis_client)
    end = JobEnd(state="failed", finish_reason="error", error="too large")
    waiting, running = shard.submit(redis_client), shard.submit(redis_client)
    shard.dispatch(redis_client, running, epoch)

    def refuse(job_id: str, epoch: int) -> tuple[int, str]:
        ref = shard.ref_of(redis_client, job_id)
        return run(redis_client, calls.refuse(KEYS, ref, epoch=epoch, end=end))

    with pytest.raises(StaleEpoch):
        refuse(waiting, epoch - 1)
    assert refuse(running, epoch) == (-2, "wkr_a")
    assert [refuse(waiting, epoch) for _ in range(2)] == [(1, "failed"), (0, "failed")]
    shard.cancel(redis_client, running, "wkr_a")
