"""``tidemill submit`` with terms, and ``tidemill status``."""

import json
import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import redis
from click.testing import Result as Outcome

from support.fake_mill import KEYS, FakeMill
from tidemill import ConfigError, InvalidRequest, Producer
from tidemill.cli.main import main
from tidemill.protocol import calls
from tidemill.protocol.calls import Backlog, Measures
from tidemill.protocol.codec import decode
from tidemill.protocol.functions import run
from tidemill.protocol.messages import GenerateRequest
from tidemill.protocol.sampling_defaults import SamplingDefaults

Tidemill = Callable[..., Outcome]


def test_terms_are_options(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    options = ["--delay", "60", "--deadline", "90.5", "--max-queue", "7", "--stall-timeout", "3"]
    more = ["--max-retries", "1", "--batch", "b", "--prefix-id", "p", "--detach"]
    more += ["--callback-url", "https://example.com/done"]
    outcome = tidemill("submit", "a", *options, *more)
    assert outcome.exit_code == 0, outcome.output
    fields = redis_client.hgetall(KEYS.job(outcome.stdout.strip()))
    submitted = int(fields[b"ts"])
    assert fields[b"st"] == b"delayed"
    assert int(fields[b"dl"]) - submitted == 90_500
    assert int(fields[b"qdl"]) - submitted == 67_000
    assert (fields[b"sm"], fields[b"mx"], fields[b"bid"]) == (b"3000", b"1", b"b")
    assert (len(fields[b"h"]), fields[b"g"]) == (8, b"1")
    assert fields[b"wh"] == b"https://example.com/done"


def test_sampling_parameters_are_options(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    options = ["--presence-penalty", "0.5", "--frequency-penalty", "-0.5", "--detach"]
    options += ["--repetition-penalty", "1.1", "--logit-bias", "3=-200", "--logit-bias", "1=2.5"]
    options += ["--bad-word", "a", "--bad-word", "b", "--logprobs", "2", "--prompt-logprobs", "0"]
    options += ["--n", "2", "--best-of", "3"]
    outcome = tidemill("submit", "a", *options)
    assert outcome.exit_code == 0, outcome.output
    stored = redis_client.hget(KEYS.job(outcome.stdout.strip()), "req") or b""
    params = decode(stored, GenerateRequest).params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.bad_words) == (1.1, ("a", "b"))
    assert params.logit_bias == ((1, 2.5), (3, -100.0))
    assert (params.logprobs, params.prompt_logprobs) == (2, 0)
    assert (params.n, params.best_of, params.use_beam_search) == (2, 3, False)


def test_what_is_not_said_is_the_models_own(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    mill.advertise(sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20))
    for options, want in (([], (0.6, 20)), (["--temperature", "1", "--top-k", "0"], (1.0, 0))):
        outcome = tidemill("submit", "a", "--detach", *options)
        assert outcome.exit_code == 0, outcome.output
        stored = redis_client.hget(KEYS.job(outcome.stdout.strip()), "req") or b""
        params = decode(stored, GenerateRequest).params
        assert (params.temperature, params.top_k) == want


@pytest.mark.parametrize(
    ("option", "content", "field", "want"),
    [
        ("--json-schema", '{"type": "object"}', "json_schema", '{"type": "object"}'),
        ("--grammar", 'start: "a"', "grammar", 'start: "a"'),
        ("--regex", None, "regex", "[ab]+"),
        ("--choice", None, "choice", ("[ab]+",)),
    ],
)
def test_what_an_answer_must_look_like_is_an_option(
    tidemill: Tidemill,
    producer: Producer,
    mill: FakeMill,
    redis_client: redis.Redis,
    tmp_path: Path,
    option: str,
    content: str | None,
    field: str,
    want: object,
) -> None:
    value = "[ab]+"
    if content is not None:
        path = tmp_path / "form"
        path.write_text(content)
        value = str(path)
    outcome = tidemill("submit", "a", option, value, "--detach")
    assert outcome.exit_code == 0, outcome.output
    stored = redis_client.hget(KEYS.job(outcome.stdout.strip()), "req") or b""
    structured = decode(stored, GenerateRequest).structured
    assert structured is not None and structured.constraint == field
    assert getattr(structured, field) == want


@pytest.mark.parametrize("text", ["2100-01-31T08:00+01:00", "2100-01-31T08:00"])
def test_a_time_without_a_zone_is_local(
    tidemill: Tidemill,
    producer: Producer,
    mill: FakeMill,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    monkeypatch.setitem(os.environ, "TZ", "Etc/GMT-1")
    time.tzset()
    outcome = tidemill("submit", "a", "--at", text, "--detach")
    monkeypatch.undo()
    time.tzset()
    assert outcome.exit_code == 0, outcome.output
    expected = datetime.fromisoformat("2100-01-31T08:00+01:00").timestamp()
    assert producer.job_status(outcome.stdout.strip()).ready_ms == expected * 1000


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (["--at", "tomorrow"], ConfigError, "'tomorrow' is not a time"),
        (["--logit-bias", "5"], ConfigError, "'5' is no token id with a bias"),
        (["--presence-penalty", "3"], InvalidRequest, "presence_penalty"),
        (["--logprobs", "21"], InvalidRequest, "params.logprobs: 21 exceed the limit of 20"),
        (["--at", "9999-12-31T23:59:59-23:00"], ConfigError, "is out of range"),
        (["--at", "0001-01-01T00:00+23:00"], ConfigError, "is out of range"),
        (["--idempotency-key", "requeue:x"], InvalidRequest, "is reserved"),
        (["--delay", "-1"], InvalidRequest, "delay: -1 s"),
        (
            ["--delay", "9", "--deadline", "9"],
            InvalidRequest,
            "deadline: 9000 ms is not after the delay",
        ),
        (["--batch", "a b"], InvalidRequest, "batch: 'a b'"),
        (["--callback-url", "example.com"], InvalidRequest, "callback_url: it is not an http"),
        (["--prefix-id", ""], InvalidRequest, "prefix_id: "),
        (["--json-schema", "none"], ConfigError, "json-schema: the file 'none' cannot be read"),
        (["--regex", "("], InvalidRequest, "structured.regex: "),
        (["--regex", "a", "--choice", "b"], InvalidRequest, "not regex and choice"),
    ],
)
def test_bad_terms_are_told(
    tidemill: Tidemill, mill: FakeMill, options: list[str], kind: type, says: str
) -> None:
    outcome = tidemill("submit", "a", *options)
    assert isinstance(outcome.exception, kind)
    assert says in str(outcome.exception)


def test_a_full_queue_says_when_to_try_again(
    mill: FakeMill,
    redis_client: redis.Redis,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    redis_client.hset(KEYS.settings, "jobs:*", 0)
    monkeypatch.setattr("sys.argv", ["tidemill", "submit", "a", "--redis-url", redis_url])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    told = capsys.readouterr().err.splitlines()
    assert told == ["error: the tenant already has 0 queued jobs. Try again in 1.0 s."]


@pytest.fixture
def ten_jobs_at_two_a_second(redis_client: redis.Redis, mill: FakeMill, producer: Producer) -> None:
    for _ in range(10):
        producer.submit([1])
    backlog = Backlog((0.0, 1_000.0, 0.0), (0, 1, 0), 200.0, (0, 10, 0))
    run(redis_client, calls.measure(KEYS, Measures(2.0, 0.0, 0.0, 0, "fsync", "run", backlog)))


@pytest.mark.usefixtures("ten_jobs_at_two_a_second")
def test_who_leaves_is_told_how_long_the_job_is_likely_to_wait(tidemill: Tidemill) -> None:
    outcome = tidemill("submit", "a", "--detach")
    assert outcome.stdout.startswith("job_")
    assert outcome.stderr == "a wait of about 5.0 s is likely\n"


@pytest.mark.usefixtures("ten_jobs_at_two_a_second")
def test_a_deadline_that_cannot_be_kept_is_told_and_the_job_is_queued(
    tidemill: Tidemill, redis_client: redis.Redis
) -> None:
    outcome = tidemill("submit", "a", "--detach", "--deadline", "4")
    assert outcome.stderr == (
        "warning: a wait of about 5.0 s is likely, longer than the deadline; the job is queued\n"
    )
    assert redis_client.hget(KEYS.job(outcome.stdout.strip()), "st") == b"queued"


@pytest.mark.usefixtures("ten_jobs_at_two_a_second")
def test_the_status_tells_how_much_work_waits_in_each_class(tidemill: Tidemill) -> None:
    text = tidemill("status").stdout
    assert "work that waits: interactive 0.0 s, standard 5.0 s, batch 0.0 s" in text
    shown = json.loads(tidemill("status", "--json").stdout)["backlog"]
    assert shown["num_jobs_by_class"] == [0, 10, 0]


def test_without_an_estimate_nothing_is_told(tidemill: Tidemill, mill: FakeMill) -> None:
    assert tidemill("submit", "a", "--detach", "--deadline", "1").stderr == ""
    assert "work that waits" not in tidemill("status").stdout


def test_the_status_shows_what_waits_for_what(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_client: redis.Redis
) -> None:
    overdue = producer.submit([1], deadline=0.001, max_tokens=9)
    producer.submit([1], delay=60, max_tokens=9)
    redis_client.xadd(KEYS.dead_letters, {"j": "x"})
    redis_client.xadd(KEYS.front_door, {"v": "1"})
    redis_client.hset(
        KEYS.settings, mapping={"jobs:*": 5, "tokens:default": 1000, "rpm:*": 60, "jobs:red": 7}
    )
    measures = Measures(1.5, 0.0, 0.0, 2_000_000, "fsync", "run")
    run(redis_client, calls.measure(KEYS, measures))
    shown = json.loads(tidemill("status", "--json").stdout)
    expected = {
        "num_queued": 2,
        "num_delayed": 1,
        "num_overdue": 1,
        "num_dead_letters": 1,
        "num_at_front_door": 1,
        "max_bytes": 2_000_000,
        "durability": "fsync",
        "jobs_per_second": 1.5,
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown["queued_bytes"] > 0
    assert [limits["tenant"] for limits in shown["limits"]] == ["*", "default", "red"]
    text = tidemill("status").stdout
    for part in ("2 of 5", "20 of 1,000", "0 of 7", "delayed: 1; overdue: 1; dead letters: 1"):
        assert part in text, text
    assert "durability of new jobs: fsync" in text
    overdue.cancel()
    redis_client.delete(KEYS.front_door)
