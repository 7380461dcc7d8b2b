"""Every function in every branch, called by a user of the role that it is for."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import redis

from support import shard
from support.acl_server import AclServer, acl_server
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls
from tidemill.protocol.batches import NewBatch
from tidemill.protocol.calls import NackOutcome, access, webhooks
from tidemill.protocol.codec import encode
from tidemill.protocol.files import StoredFile
from tidemill.protocol.functions import Call, run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import (
    JobEnd,
    JobTerms,
    KvEvents,
    KvSnapshot,
    ModelCard,
    WorkerInfo,
    WorkerStatus,
)

HOUR = 3_600_000
LIMITED = JobTerms(
    deadline_ms=HOUR, max_queue_ms=HOUR, stall_ms=HOUR, max_retries=1, batch="nightly"
)


@dataclass
class Users:
    """One connection for each user; ``tester`` may do everything, as time that passes does."""

    producer: redis.Redis
    gateway: redis.Redis
    worker: redis.Redis
    scheduler: redis.Redis
    operator: redis.Redis
    guest: redis.Redis
    tester: redis.Redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclServer]:
    with acl_server(tmp_path_factory.mktemp("acl")) as server:
        yield server


@pytest.fixture
def users(server: AclServer) -> Iterator[Users]:
    """Connections to a server on which an operator has set every bound."""
    with ExitStack() as stack:
        names = Users.__dataclass_fields__
        users = Users(**{name: stack.enter_context(server.client(name)) for name in names})
        users.tester.flushall()
        limits = {"jobs:*": 100, "tokens:*": 10_000, "rpm:*": 6000, "tpm:*": 10**6, "back:*": 10}
        users.operator.hset(KEYS.settings, mapping={**limits, "bytes": 10**6})
        users.operator.hdel(KEYS.settings, "nothing")
        server.refusals()
        yield users
        assert server.refusals() == []


def submit(users: Users, terms: JobTerms = LIMITED) -> str:
    return shard.submit(
        users.producer,
        terms=terms,
        num_tokens=5,
        idempotency_key=f"{users.tester.incr('count')}",
        body_digest="b",
    )


def start(users: Users, job_id: str) -> int:
    epoch = shard.lead(users.scheduler)
    return shard.dispatch(users.scheduler, job_id, epoch).fence


def test_a_jobs_whole_life(users: Users) -> None:
    job_id = submit(users, LIMITED.model_copy(update={"delay_ms": HOUR // 2}))
    users.tester.zadd(KEYS.delayed, {job_id: 1})
    assert shard.promote(users.scheduler, job_id)
    fence = start(users, job_id)
    assert shard.claim(users.worker, job_id, fence)
    assert shard.append(users.worker, job_id, fence, 0, 1).accepted
    assert shard.release(users.worker, job_id, fence)
    fence = start(users, job_id)
    assert shard.nack(users.worker, job_id, fence) is NackOutcome.DELAYED
    users.tester.zadd(KEYS.delayed, {job_id: 1})
    assert shard.promote(users.scheduler, job_id)
    assert shard.finish(users.worker, job_id, start(users, job_id), 1, 1).accepted
    assert run(users.scheduler, calls.retire(KEYS, QUEUE))
    [member] = users.scheduler.zrange(KEYS.ended, 0, -1)
    ref = shard.ref_of(users.tester, job_id)
    assert run(users.scheduler, calls.trim(KEYS, [(member.decode(), ref)])) == 1


def test_the_use_of_api_keys(users: Users) -> None:
    users.operator.hset(KEYS.api_keys, "k", "{}")
    assert users.gateway.hmget(KEYS.api_keys, "k", "x:k") == [b"{}", None]
    assert run(users.gateway, access.use_key(KEYS, key_id="k"))
    charge = access.charge_key(KEYS, key_id="k", limits=access.KeyLimits(1, 9), requests=1)
    first, second = run(users.gateway, charge), run(users.gateway, charge)
    assert first.wait_ms == 0 < second.wait_ms <= 60_000
    users.operator.hdel(KEYS.api_keys, "k", "x:k")
    users.operator.hdel(KEYS.api_key_uses, "k")
    assert not run(users.gateway, access.use_key(KEYS, key_id="k"))
    assert not users.tester.exists(KEYS.api_key_uses)


@pytest.mark.parametrize("who", ["producer", "gateway", "operator"])
def test_a_batch_that_has_a_key(users: Users, who: str) -> None:
    client: redis.Redis = getattr(users, who)
    assert run(client, calls.put_file(KEYS, "t", StoredFile("f", 1, "n", "batch"), ttl_ms=HOUR))
    batch = NewBatch("b", "/v1/completions", "f", "24h", 86400, idempotency_key="k")
    again = replace(batch, batch_id="c")
    made = [run(client, calls.create_batch(KEYS, "t", each)) for each in (batch, again)]
    assert made == [(1, "b"), (0, "b")]


def test_a_retry_that_would_be_too_late(users: Users) -> None:
    job_id = submit(users)
    pause = calls.RetryPause(base_ms=2 * HOUR, cap_ms=2 * HOUR)
    fence = start(users, job_id)
    assert shard.nack(users.worker, job_id, fence, pause=pause) is NackOutcome.EXPIRED


def test_dead_jobs_and_their_letters(users: Users) -> None:
    given_up = submit(users, LIMITED.model_copy(update={"max_retries": 0}))
    fence = start(users, given_up)
    assert shard.nack(users.worker, given_up, fence) is NackOutcome.DEAD
    crashing = submit(users)
    for _ in range(calls.MAX_CRASHES):
        shard.claim(users.worker, crashing, start(users, crashing))
        shard.expire_lease(users.tester, crashing)
        shard.reap(users.scheduler, crashing)
    pointer = users.tester.xadd(KEYS.ingress(QUEUE), {"nonsense": "1"}).decode()
    bury = calls.bury(KEYS, queue=QUEUE, entry_id=pointer, job_id=b"?", reason="odd")
    assert run(users.scheduler, bury)
    letters = users.operator.xrange(KEYS.dead_letters)
    assert len(letters) == 3
    for entry, fields in letters:
        ref = shard.ref_of(users.tester, fields[b"j"].decode())
        call = calls.drop_letter(KEYS, ref, entry_id=entry.decode(), with_job=True)
        assert run(users.operator, call)
    assert shard.submit(users.operator, terms=LIMITED, parent=given_up)


def test_time_limits_of_waiting_and_running_jobs(users: Users) -> None:
    for is_running in (False, True):
        job_id = submit(users)
        if is_running:
            start(users, job_id)
        users.tester.zadd(KEYS.due, {job_id: 1})
        assert shard.expire(users.scheduler, job_id, "wkr_a") == ""
        users.tester.hset(KEYS.job(job_id), "dl", 1)
        users.tester.zadd(KEYS.due, {job_id: 1})
        assert shard.expire(users.scheduler, job_id, "wkr_a") == "deadline"


@pytest.mark.parametrize("who", ["producer", "operator"])
def test_cancelling_in_every_state(users: Users, who: str) -> None:
    client: redis.Redis = getattr(users, who)
    running, queued = submit(users), submit(users)
    delayed = submit(users, LIMITED.model_copy(update={"delay_ms": HOUR // 2}))
    start(users, running)
    for job_id in (running, queued, delayed):
        assert shard.cancel(client, job_id, "wkr_a") == (1, "cancelled")


@pytest.mark.parametrize("who", ["producer", "operator"])
def test_closing_a_batch(users: Users, who: str) -> None:
    for batch in ("empty", "nightly"):
        submit(users)
        close = calls.close_batch(KEYS, tenant="default", batch=batch, state="cancelled")
        assert run(getattr(users, who), close)
        users.tester.delete(KEYS.batch("default", batch))


def admit_one(users: Users) -> str:
    """Let the leader submit what an entry of the front door asks for."""
    epoch = shard.lead(users.scheduler)
    entry = users.guest.xadd(KEYS.front_door, {"v": "1", "body": "{}"}).decode()
    positions = {KEYS.front_door: "0"}
    [entries] = run(
        users.scheduler, calls.read(KEYS, epoch=epoch, positions=positions, count=9)
    ).entries
    assert isinstance(entries, list) and entries[-1][0].decode() == entry
    run(users.scheduler, calls.salt(KEYS, tenant="default", random=b"s" * 16))
    job = calls.NewJob(new_job_id(), shard.REQUEST, terms=LIMITED, idempotency_key="front:1")
    admitted = run(users.scheduler, calls.admit(KEYS, job, epoch=epoch, entry_id=entry))
    assert admitted is not None
    assert run(users.scheduler, calls.acknowledge(KEYS.front_door, [entry])) == 1
    return admitted.job_id


def test_both_doors(users: Users) -> None:
    users.scheduler.xgroup_create(KEYS.front_door, "sched", "0", mkstream=True)
    for refusal in ("", "not JSON"):
        entry = users.guest.xadd(KEYS.front_door, {"v": "1", "body": "{}"}).decode()
        users.scheduler.xreadgroup("sched", "s", {KEYS.front_door: ">"})
        answer = calls.answer(KEYS, entry_id=entry, reply=b"{}", refusal=refusal, body=b"{}")
        assert run(users.scheduler, answer)
        assert users.guest.blpop(KEYS.front_reply(entry), timeout=30)
    job_id = admit_one(users)
    users.guest.xgroup_create(KEYS.back_door("default"), "mine", "0", mkstream=True)
    shard.cancel(users.producer, job_id)
    [(_, [(entry, fields)])] = users.guest.xreadgroup(
        "mine", "me", {KEYS.back_door("default"): ">"}
    )
    assert fields[b"j"] == job_id.encode()
    assert users.guest.xack(KEYS.back_door("default"), "mine", entry)


def test_a_worker_and_a_leader_by_themselves(users: Users) -> None:
    info = WorkerInfo(
        worker_id="wkr_a",
        model="m",
        num_blocks=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        wire_version=1,
    )
    card = ModelCard(name="m", revision="r", tokenizer_digest="t", max_model_len=9, vocab_size=9)
    run(users.worker, calls.register(KEYS, info=info, card=card, tokenizer=b"z", lease_ms=HOUR))
    run(users.worker, calls.report(KEYS, worker_id="wkr_a", status=WorkerStatus()))
    events, snapshot = encode(KvEvents(seq=1)), encode(KvSnapshot(seq=1))
    told = calls.report(
        KEYS, worker_id="wkr_a", status=WorkerStatus(), events=events, snapshot=snapshot
    )
    run(users.worker, told)
    assert users.scheduler.get(KEYS.kv_snapshot("wkr_a")) == snapshot
    assert users.scheduler.xrevrange(KEYS.status("wkr_a"), count=1)[0][1][b"k"] == events
    hint = calls.hint(KEYS, worker_id="wkr_a", refs={b"12345678": 1})
    assert not run(users.scheduler, hint)
    job_id = submit(users)
    owned = [(job_id, start(users, job_id))]
    beat = calls.beat(
        KEYS, worker_id="wkr_a", model="m", tokenizer_digest="t", lease_ms=HOUR, jobs=owned
    )
    assert run(users.worker, beat) == calls.Beat(registered=True, lost=())
    run(users.scheduler, calls.measure(KEYS, calls.Measures(1, 1, 1, 0, "fast", "r")))
    end = JobEnd(state="failed", finish_reason="error", error="never")
    ref = shard.ref_of(users.scheduler, job_id)
    epoch = shard.lead(users.scheduler)
    assert run(users.scheduler, calls.refuse(KEYS, ref, epoch=epoch, end=end)) == (-2, "wkr_a")
    assert run(users.scheduler, hint)
    leave = calls.deregister(KEYS, worker_id="wkr_a", cursor="0-0")
    [(_, unread), (_, hinted)] = run(users.worker, leave)
    assert (unread[b"j"], hinted[b"k"]) == (job_id.encode(), b"hint")
    assert not users.scheduler.exists(KEYS.kv_snapshot("wkr_a"))
    assert shard.release(users.worker, job_id, owned[0][1])
    ref = shard.ref_of(users.scheduler, job_id)
    assert run(users.scheduler, calls.refuse(KEYS, ref, epoch=epoch, end=end)) == (1, "failed")
    run(users.scheduler, calls.resign(KEYS, scheduler_id="sch_test"))


def test_the_leader_may_drop_an_old_library(users: Users, server: AclServer) -> None:
    with server.client("deploy") as deploy:
        deploy.function_load(
            "#!lua name=tm1\nredis.register_function('tm1_x', function() return 1 end)"
        )
    assert users.scheduler.function_list(library="tm1")
    assert users.scheduler.function_delete("tm1")


def test_webhooks_from_the_end_of_a_job_to_their_replay(users: Users) -> None:
    edit = {"tenant": "default", "field": "e:we_1", "expected": "", "new": "{}", "off": ""}
    assert run(users.operator, webhooks.edit_hook(KEYS, **edit)) == webhooks.Edited.DONE
    run(users.operator, webhooks.test_hook(KEYS, tenant="t", endpoint_id="we_1", event_id="evt_t"))
    ended = submit(users, LIMITED.model_copy(update={"callback_url": "https://example.com/"}))
    assert shard.finish(users.worker, ended, start(users, ended), 0).accepted
    assert shard.cancel(users.producer, submit(users))[0] == 1
    entries = [entry.decode() for entry, _ in users.scheduler.xrange(KEYS.outbox)]
    assert len(entries) == 3 and users.scheduler.hgetall(KEYS.hooks("default"))
    posting = webhooks.Posting("d", "we_1", "https://example.com/", "c")
    for entry in entries:
        post = webhooks.post_event(
            KEYS,
            entry_id=entry,
            tenant="default",
            event_type="response.completed",
            event_id="evt_1",
            body=b"{}",
            postings=[posting],
        )
        assert run(users.scheduler, post)
    hand = webhooks.hand_delivery(KEYS, delivery_id="d", attempts=0, hands=0, wait_ms=1)
    assert run(users.scheduler, hand)
    for outcome, counts, off in (
        (webhooks.Outcome.RETRY, webhooks.Counts.FAILURE, ""),
        (webhooks.Outcome.FAILED, webhooks.Counts.ANSWER, "410"),
        (webhooks.Outcome.DELIVERED, webhooks.Counts.NOTHING, ""),
    ):
        taken = run(users.scheduler, _take())
        assert isinstance(taken, webhooks.Taken)
        mark = webhooks.Mark(outcome, "{}", counts, off_reason=off)
        marking = webhooks.mark_delivery(KEYS, delivery_id="d", taken=taken, mark=mark)
        assert run(users.scheduler, marking)
        assert run(users.operator, webhooks.replay_delivery(KEYS, delivery_id="d")) == 1
    users.tester.hset(KEYS.delivery("d"), "ex", 1)
    assert run(users.scheduler, _take()) == webhooks.Refusal.OLD
    for ttl_ms in (1000, 0):
        run(users.scheduler, webhooks.serve_hooks(KEYS, worker_id="w", ttl_ms=ttl_ms))
    secret = {"tenant": "default", "field": "cb", "expected": "", "new": "[]"}
    assert run(users.scheduler, webhooks.edit_hook(KEYS, **secret)) == webhooks.Edited.DONE
    gone = {**edit, "expected": "{}", "new": ""}
    assert run(users.operator, webhooks.edit_hook(KEYS, **gone)) == webhooks.Edited.DONE


def _take() -> Call[webhooks.Taken | webhooks.Refusal]:
    return webhooks.take_delivery(
        KEYS,
        delivery_id="d",
        tenant="default",
        circuit="c",
        lease_ms=1000,
        max_in_flight=1,
        pause_ms=1,
        failures_to_open=1,
    )
