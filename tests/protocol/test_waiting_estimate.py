"""The waiting time that submit returns, against the formula of the scheduler."""

import math
import struct

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import shard
from support.shard import KEYS
from tidemill.protocol import calls
from tidemill.protocol.calls import Backlog, Measures, NewJob
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import GenerateRequest, JobTerms
from tidemill_scheduler.policy.waiting_times import waiting_seconds

pytestmark = pytest.mark.leaks_keys

NUMBERS = struct.Struct(">14d")

#: 100 jobs of 50 tokens of 5 tenants in the standard class, 10 and 20 jobs in the others.
BACKLOG = Backlog((500.0, 5_000.0, 4_000.0), (2, 5, 1), 100.0, (10, 100, 20))


def tell(client: redis.Redis, backlog: Backlog | None) -> None:
    run(client, calls.measure(KEYS, Measures(1.0, 1.0, 1.0, 0, "fsync", "r1", backlog)))


def submit(
    client: redis.Redis,
    priority: int = 0,
    tenant: str = "default",
    terms: JobTerms | None = None,
    *,
    cost: int = 0,
    num_tokens: int = 0,
) -> int | None:
    request = GenerateRequest(model="m", prompt_ids=(1,), priority=priority, tenant=tenant)
    run(client, calls.salt(KEYS, tenant=tenant, random=b"\x07" * 16))
    job = NewJob(new_job_id(), request, cost=cost, num_tokens=num_tokens, terms=terms or JobTerms())
    reply = run(client, calls.submit(KEYS, job))
    assert reply.created
    return reply.wait_ms


def in_ms(seconds: float | None) -> int:
    assert seconds is not None
    return math.floor(1000 * seconds + 0.5)


def test_nobody_knows_the_wait_before_there_is_a_leader(redis_client: redis.Redis) -> None:
    assert submit(redis_client) is None


def test_a_leader_that_does_not_know_its_backlog_gives_no_estimate(
    redis_client: redis.Redis,
) -> None:
    tell(redis_client, None)
    assert submit(redis_client) is None


def test_a_leader_without_a_rate_gives_no_estimate(redis_client: redis.Redis) -> None:
    tell(redis_client, Backlog((1.0, 1.0, 1.0), (1, 1, 1), 0.0, (1, 1, 1)))
    assert submit(redis_client) is None


@pytest.mark.parametrize("known", [None, Backlog((0, 0, 0), (0, 0, 0), 0.0, (0, 0, 0))])
def test_a_burst_before_any_rate_is_known_has_no_estimate(
    redis_client: redis.Redis, known: Backlog | None
) -> None:
    tell(redis_client, known)
    waits = [submit(redis_client, 7, cost=100, num_tokens=150) for _ in range(3)]
    assert waits == [None, None, None]


def test_a_burst_on_an_idle_shard_counts_its_own_jobs(redis_client: redis.Redis) -> None:
    idle = Backlog((0, 0, 0), (0, 0, 0), 1_000.0, (0, 0, 0))
    tell(redis_client, idle)
    waits = [submit(redis_client, 7, cost=100, num_tokens=149) for _ in range(200)]
    assert waits[:2] == [100, 250]
    assert waits == [
        in_ms(waiting_seconds(idle, 2, number, cost=100, mean_tokens=149.0))
        for number in range(200)
    ]
    deadline = JobTerms(deadline_ms=20_000)
    assert calls.is_at_risk(deadline, waits[-1])


def test_a_burst_of_a_class_that_had_no_jobs_is_like_the_jobs_of_others(
    redis_client: redis.Redis,
) -> None:
    backlog = Backlog((0, 500.0, 0), (0, 1, 0), 100.0, (0, 10, 0))
    tell(redis_client, backlog)
    waits = [submit(redis_client, 7, num_tokens=10_000) for _ in range(4)]
    # Jobs of 50 tokens, and four times as much of p1 as long as it has some.
    assert waits == [0, 2_500, 5_000, 6_500]
    assert waits == [in_ms(waiting_seconds(backlog, 2, number)) for number in range(4)]


def test_the_wait_grows_with_each_job_of_the_tenant(redis_client: redis.Redis) -> None:
    tell(redis_client, BACKLOG)
    waits = [submit(redis_client) for _ in range(5)]
    assert waits == [in_ms(waiting_seconds(BACKLOG, 1, number)) for number in range(5)]
    # A job of 50 tokens, as much for each of 4 tenants, all 500 of p0 (at twice the share), 62.5.
    assert waits[:2] == [0, 8125]


@pytest.mark.parametrize(("priority", "rank"), [(-5, 0), (0, 1), (7, 2)])
def test_only_the_jobs_of_the_same_class_go_first(
    redis_client: redis.Redis, priority: int, rank: int
) -> None:
    tell(redis_client, BACKLOG)
    for other in (-1, 0, 1):
        submit(redis_client, priority=other)
    assert submit(redis_client, priority=priority) == in_ms(waiting_seconds(BACKLOG, rank, 1))


@pytest.mark.parametrize(
    ("field", "value", "weight"),
    [
        ("weight:default", "4", 4.0),
        ("weight:*", "2.5", 2.5),
        ("weight:red", "9", 1.0),
        ("weight:default", "0", 1.0),
        ("weight:default", "1e9", 1.0),
        ("weight:default", "heavy", 1.0),
    ],
)
def test_a_tenants_weight_shortens_its_wait(
    redis_client: redis.Redis, field: str, value: str, weight: float
) -> None:
    redis_client.hset(KEYS.settings, field, value)
    tell(redis_client, BACKLOG)
    submit(redis_client)
    assert submit(redis_client) == in_ms(waiting_seconds(BACKLOG, 1, 1, weight))


work = st.floats(0, 1e9).map(lambda tokens: round(tokens, 3))
many = st.integers(0, 1000)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    backlog=st.builds(
        Backlog,
        work_by_class=st.tuples(work, work, work),
        num_tenants_by_class=st.tuples(many, many, many),
        tokens_per_second=st.integers(1, 10**6).map(float),
        num_jobs_by_class=st.tuples(many, many, many),
    ),
    own=st.integers(0, 4),
    cost=st.integers(0, 10**6),
    num_tokens=st.integers(0, 10**6),
    priority=st.integers(-1, 1),
    weight=st.sampled_from([0.1, 1.0, 2.0, 100.0]),
)
def test_the_library_and_the_scheduler_agree(
    redis_client: redis.Redis,
    backlog: Backlog,
    own: int,
    cost: int,
    num_tokens: int,
    priority: int,
    weight: float,
) -> None:
    redis_client.delete(KEYS.ingress(f"p{priority + 1}:default"), KEYS.counters)
    redis_client.hset(KEYS.settings, "weight:default", f"{weight}")
    tell(redis_client, backlog)
    for _ in range(own):
        submit(redis_client, priority=priority, num_tokens=7)
    mean_tokens = (own * 7 + num_tokens) / (own + 1)
    expected = waiting_seconds(
        backlog, priority + 1, own, weight, cost=cost, mean_tokens=mean_tokens
    )
    assert expected is not None
    wait_ms = submit(redis_client, priority=priority, cost=cost, num_tokens=num_tokens)
    assert wait_ms == pytest.approx(1000 * expected, abs=1, rel=1e-9)


def test_what_a_leader_told_long_ago_is_no_estimate(redis_client: redis.Redis) -> None:
    tell(redis_client, BACKLOG)
    told_ms, *numbers = NUMBERS.unpack(redis_client.hget(KEYS.measures, "bk"))
    redis_client.hset(KEYS.measures, "bk", NUMBERS.pack(told_ms - 9_000, *numbers))
    assert submit(redis_client) is not None
    redis_client.hset(KEYS.measures, "bk", NUMBERS.pack(told_ms - 10_001, *numbers))
    assert submit(redis_client) is None


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"x",
        b"\xff" * 14 * 8,
        b"\x00" * 13 * 8,
        NUMBERS.pack(*[math.nan] * 14),
        NUMBERS.pack(*[math.inf] * 14),
        NUMBERS.pack(*[-1.0] * 14),
        NUMBERS.pack(1e99, 1.0, *[math.nan] * 12),
    ],
)
def test_a_damaged_backlog_is_no_estimate_and_stops_no_submission(
    redis_client: redis.Redis, told: bytes
) -> None:
    shard.submit(redis_client)
    redis_client.hset(KEYS.measures, "bk", told)
    assert submit(redis_client) is None
    assert Backlog.read(told, 10**12) is None


def test_a_delay_comes_on_top(redis_client: redis.Redis) -> None:
    tell(redis_client, BACKLOG)
    submit(redis_client)
    assert submit(redis_client, terms=JobTerms(delay_ms=60_000)) == 60_000 + 8_125


def test_a_job_that_was_there_already_has_no_estimate(redis_client: redis.Redis) -> None:
    tell(redis_client, BACKLOG)
    job_id = shard.submit(redis_client)
    again = run(redis_client, calls.submit(KEYS, NewJob(job_id, shard.REQUEST)))
    assert (again.created, again.wait_ms) == (False, None)


def test_what_is_told_can_be_read(redis_client: redis.Redis) -> None:
    tell(redis_client, BACKLOG)
    now = shard.server_ms(redis_client)
    told = redis_client.hget(KEYS.measures, "bk")
    assert Backlog.read(told, now) == BACKLOG
    assert Backlog.read(told, now + 11_000) is None
    assert Backlog.read(None, now) is None


@pytest.mark.parametrize(
    ("deadline_ms", "wait_ms", "is_at_risk"),
    [(0, 10**9, False), (5_000, 5_000, False), (5_000, 5_001, True), (5_000, None, False)],
)
def test_a_deadline_before_the_end_of_the_wait_is_at_risk(
    deadline_ms: int, wait_ms: int | None, is_at_risk: bool
) -> None:
    assert calls.is_at_risk(JobTerms(deadline_ms=deadline_ms), wait_ms) is is_at_risk
