"""``tidemill dlq``."""

import json
from collections.abc import Callable

import pytest
import redis
from click.testing import Result as Outcome

from support.fake_mill import KEYS, FakeMill
from support.shard import expire_lease
from tidemill import ConfigError, JobFailed, Producer
from tidemill.dead_letters import DeadLetters
from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef, RetryPause
from tidemill.protocol.functions import run
from tidemill.protocol.messages import JobEnd

Tidemill = Callable[..., Outcome]
SECRET = "the secret of the mill"


def kill(
    producer: Producer, mill: FakeMill, error: str = "the disk is full", **options: object
) -> str:
    """A job that its worker gave up after two tokens; returns its id."""
    job_id = producer.submit(SECRET, max_retries=0, **options).id  # type: ignore[arg-type]
    attempt = mill.claim()
    assert attempt.job_id == job_id
    attempt.say(2)
    call = calls.nack(
        KEYS,
        JobRef.read(job_id, mill.client.hmget(KEYS.job(job_id), REF_FIELDS)),
        fence=attempt.fence,
        worker_id=attempt.worker_id,
        error=error,
        pause=RetryPause(),
    )
    assert run(mill.client, call).name == "DEAD"
    return job_id


def bury_entry(client: redis.Redis) -> None:
    """A pointer that nobody can read."""
    client.xadd(KEYS.ingress("p1:blue"), {"j": b"\xff"})
    client.xgroup_create(KEYS.ingress("p1:blue"), "sched", "0")
    [(entry_id, _)] = client.xrange(KEYS.ingress("p1:blue"))
    call = calls.bury(
        KEYS, queue="p1:blue", entry_id=entry_id.decode(), job_id=b"\xff", reason="no job id"
    )
    assert run(client, call)
    client.delete(KEYS.ingress("p1:blue"))


def rows(outcome: Outcome) -> list[dict[str, object]]:
    assert outcome.exit_code == 0, outcome.output
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def listed(tidemill: Tidemill, *args: str) -> list[dict[str, object]]:
    return rows(tidemill("dlq", "list", "--json", *args))


def test_letters_are_listed_and_filtered(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    first, second = kill(producer, mill), kill(producer, mill, "out of luck")
    bury_entry(redis_client)
    letters = listed(tidemill)
    assert [letter["job"] for letter in letters][:2] == [first, second]
    assert [letter["tenant"] for letter in letters] == ["default", "default", "blue"]
    assert letters[0]["reason"] == "the disk is full"
    assert [letter["job"] for letter in listed(tidemill, "--reason", "DISK")] == [first]
    assert len(listed(tidemill, "--tenant", "blue")) == 1
    table = tidemill("dlq", "list").stdout
    assert first in table and "out of luck" in table and "no job id" in table
    few = tidemill("dlq", "list", "--limit", "1")
    assert first in few.stdout and second not in few.stdout
    assert "There are more" in few.stderr


def test_a_letter_is_shown_without_its_prompt_unless_it_is_asked_for(
    tidemill: Tidemill, producer: Producer, mill: FakeMill
) -> None:
    job_id = kill(producer, mill, stop=["secret stop"], max_tokens=9, batch="b")
    [letter] = listed(tidemill)
    for args in ([], ["--json"]):
        shown = tidemill("dlq", "show", job_id, *args)
        assert shown.exit_code == 0
        for part in (
            str(letter["letter"]),
            "the disk is full",
            "max_tokens",
            '"b"' if args else "b",
        ):
            assert part in shown.stdout
        assert "secret" not in shown.stdout
    [details] = rows(tidemill("dlq", "show", str(letter["letter"]), "--json"))
    assert details["generated_tokens"] == 2
    assert details["retries"] == "0 of 0"
    assert details["prompt_size"] == "5 token ids"
    [details] = rows(tidemill("dlq", "show", job_id, "--json", "--prompt"))
    assert details["prompt_ids"] == [0] * 5
    assert details["stop"] == ["secret stop"]


def test_a_requeued_job_is_a_new_one_with_a_parent(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    options = {"batch": "b", "deadline": 60, "priority": 2, "max_tokens": 5, "prefix_id": "p"}
    job_id = kill(producer, mill, **options)
    outcome = tidemill("dlq", "requeue", job_id)
    assert outcome.exit_code == 0, outcome.output
    old, _, new = outcome.stdout.strip().partition(" -> ")
    assert old == job_id
    status = producer.job_status(new)
    assert (status.parent, status.batch, status.priority) == (job_id, "b", 2)
    assert (status.deadline_ms, status.max_retries) == (None, 0)
    assert listed(tidemill) == []
    kept = [redis_client.hmget(KEYS.job(name), "h", "mt", "g") for name in (job_id, new)]
    assert kept[0] == kept[1] == [kept[0][0], b"5", b"1"]
    attempt = mill.claim()
    assert attempt.job_id == new
    attempt.finish(3)
    assert producer.result(new).token_ids == (0, 1, 2)
    with pytest.raises(JobFailed, match="the disk is full"):
        producer.result(job_id)
    ends = producer.batch("b").status()
    assert (ends.total, ends.dead, ends.done) == (2, 1, 1)


def test_a_requeue_that_was_cut_off_is_finished_by_the_next(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = kill(producer, mill)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeadLetters, "_drop", die)
        tidemill("dlq", "requeue", job_id)
    assert len(listed(tidemill)) == 1
    waiting = mill.claim()
    outcome = tidemill("dlq", "requeue", job_id)
    assert outcome.stdout == f"{job_id} -> {waiting.job_id}\n"
    assert listed(tidemill) == []
    assert producer.status().num_queued == 0


def test_what_is_no_job_is_dropped_but_not_requeued(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    bury_entry(redis_client)
    redis_client.xadd(
        KEYS.dead_letters, {"j": "", "r": "not JSON", "q": "front", "e": "1-1", "b": b"\xfebody"}
    )
    job_id = kill(producer, mill)
    shown = tidemill("dlq", "show", listed(tidemill)[1]["letter"], "--prompt")
    assert "\\xfebody" in shown.stdout
    outcome = tidemill("dlq", "requeue", "--all", "--yes")
    assert outcome.exit_code == 1
    assert outcome.stderr.count("an entry that nobody could read") == 2
    assert outcome.stdout.startswith(f"{job_id} -> job_")
    assert len(listed(tidemill)) == 2
    assert tidemill("dlq", "drop", "--all", "--yes").stdout.count("dropped") == 2
    assert listed(tidemill) == []


def test_a_dropped_letter_takes_its_job_along(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id, other = kill(producer, mill), kill(producer, mill, "out of luck")
    assert "dropped" in tidemill("dlq", "drop", job_id).stdout
    assert not redis_client.exists(KEYS.job(job_id), KEYS.token_log(job_id))
    assert [letter["job"] for letter in listed(tidemill)] == [other]
    refused = tidemill("dlq", "drop", "--all", "--reason", "luck", answer="n\n")
    assert refused.exit_code == 1 and "Drop 1 dead letters?" in refused.stderr
    assert len(listed(tidemill)) == 1


def test_a_forgotten_job_cannot_be_requeued(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = kill(producer, mill)
    redis_client.delete(KEYS.job(job_id))
    outcome = tidemill("dlq", "requeue", job_id)
    assert outcome.exit_code == 1
    assert "its request is not kept any more" in outcome.stderr
    assert tidemill("dlq", "show", job_id).exit_code == 0


def test_a_requeue_waits_for_room(
    tidemill: Tidemill,
    producer: Producer,
    mill: FakeMill,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = kill(producer, mill)
    redis_client.hset(KEYS.settings, "jobs:*", 0)
    waits: list[float] = []

    def make_room(seconds: float) -> None:
        waits.append(seconds)
        redis_client.hdel(KEYS.settings, "jobs:*")

    monkeypatch.setattr("tidemill.cli.dlq.time.sleep", make_room)
    outcome = tidemill("dlq", "requeue", job_id)
    assert outcome.stdout.startswith(f"{job_id} -> job_")
    assert waits == [1.0]


def test_a_job_that_crashed_its_workers_is_a_letter_too(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    job_id = producer.submit([1]).id
    attempt = mill.claim()
    attempts = [(job_id, attempt.fence)]
    run(redis_client, calls.claim(KEYS, worker_id=attempt.worker_id, jobs=attempts))
    expire_lease(redis_client, job_id)
    reference = JobRef.read(job_id, redis_client.hmget(KEYS.job(job_id), REF_FIELDS))
    end = JobEnd(state="dead", finish_reason="error", error="crashed its workers")
    assert run(redis_client, calls.reap(KEYS, reference, end=end, max_crashes=1)) == 2
    [letter] = listed(tidemill)
    assert (letter["job"], letter["reason"]) == (job_id, "crashed its workers")
    assert tidemill("dlq", "requeue", job_id).exit_code == 0


@pytest.mark.parametrize("command", ["requeue", "drop"])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "either ids or --all"),
        (["1-1", "--all"], "either ids or --all"),
        (["1-1", "--reason", "x"], "choose among --all"),
        (["1-1"], "no dead letter '1-1'"),
    ],
)
def test_which_letters_must_be_clear(
    tidemill: Tidemill, redis_client: redis.Redis, command: str, args: list[str], says: str
) -> None:
    outcome = tidemill("dlq", command, *args)
    assert isinstance(outcome.exception, ConfigError)
    assert says in str(outcome.exception)


@pytest.mark.parametrize("command", ["", "list", "show", "requeue", "drop"])
def test_the_help_teaches(tidemill: Tidemill, command: str) -> None:
    outcome = tidemill("dlq", *([command] if command else []), "--help")
    assert outcome.exit_code == 0
    assert len(outcome.stdout.split()) > 30


@pytest.mark.leaks_keys
def test_a_letter_whose_number_cannot_be_read_is_listed_shown_and_dropped(
    tidemill: Tidemill, redis_client: redis.Redis
) -> None:
    fields = {"j": b"\xff", "r": b"\xfe", "a": b"abc"}
    letter_id = redis_client.xadd(KEYS.dead_letters, fields).decode()
    [letter] = listed(tidemill)
    assert (letter["letter"], letter["attempts"]) == (letter_id, None)
    assert "?" in tidemill("dlq", "list").stdout
    assert tidemill("dlq", "show", letter_id).exit_code == 0
    assert tidemill("dlq", "drop", "--all", "--yes").exit_code == 0
    assert not redis_client.xlen(KEYS.dead_letters)


def test_a_dead_job_with_a_number_that_cannot_be_read_is_not_requeued(
    tidemill: Tidemill, producer: Producer, mill: FakeMill
) -> None:
    job_id = kill(producer, mill)
    mill.client.hset(KEYS.job(job_id), "cost", "abc")
    told = tidemill("dlq", "requeue", job_id)
    assert told.exit_code == 1
    assert f"{KEYS.job(job_id)}: cost" in told.stderr
    assert tidemill("dlq", "drop", job_id).exit_code == 0
