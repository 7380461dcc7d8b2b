"""The page of the wire contract says what the code does."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support import shard
from support.shard import KEYS, QUEUE
from tidemill.protocol import calls, logprobs, messages, outcomes, requests, sampling
from tidemill.protocol.batches import NO_USAGE, NewBatch
from tidemill.protocol.calls import JobRef, RetryPause, responses, webhooks
from tidemill.protocol.files import StoredFile
from tidemill.protocol.functions import _ERRORS, LUA_SOURCE, Call, run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.keys import ShardKeys, is_permanent
from tidemill.protocol.messages import (
    JobEnd,
    JobResult,
    JobTerms,
    ModelCard,
    TokenChunk,
    WorkerInfo,
    WorkerStatus,
)
from tidemill.protocol.sampling_defaults import SamplingDefaults
from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill.protocol.wire_model import WireModel

PAGE = (Path(__file__).parents[2] / "docs" / "redis-keys.md").read_text()
NUM_ENDING_KEYS = 16


def rows(heading: str) -> Iterator[list[str]]:
    """The rows of all tables of one section."""
    section = PAGE.split(f"{heading}\n", 1)[1]
    section = re.split(r"^#+ ", section, maxsplit=1, flags=re.MULTILINE)[0]
    for line in section.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def key_names() -> list[str]:
    """The name of every key and channel, without its prefix, of arguments called as they are."""
    keys = ShardKeys()
    names = []
    for name, member in inspect.getmembers(ShardKeys):
        if isinstance(member, property) and name != "prefix":
            names.append(getattr(keys, name))
        elif inspect.isfunction(member) and not name.startswith("_"):
            arguments = list(inspect.signature(member).parameters)[1:]
            names.append(member(keys, *arguments))
    return [name.removeprefix(keys.prefix) for name in names]


def test_every_key_and_channel_is_documented_with_its_life() -> None:
    table = {re.split(r"[:`]", row[0].strip("`"))[0]: row for row in rows("## Keys and channels")}
    kinds = {name.partition(":")[0] for name in key_names()}
    assert kinds == table.keys() - {"key", "channel"}
    for name in key_names():
        row = table[name.partition(":")[0]]
        if len(row) == 4 and ":" not in name and name != "sch":
            assert (row[3] == "permanent") == is_permanent(KEYS.prefix.encode() + name.encode())


@pytest.mark.leaks_keys
def test_every_field_of_a_job_is_documented(redis_client: redis.Redis) -> None:
    documented = {
        name for row in rows("### The job hash") for name in re.findall(r"`(\w+)`", row[0])
    }
    epoch = shard.lead(redis_client)
    terms = JobTerms(
        deadline_ms=10**6,
        max_queue_ms=10**6,
        stall_ms=10**6,
        batch="b",
        callback_url="https://example.com/",
        metadata={"of": "test"},
    )
    job_id = shard.submit(
        redis_client, terms=terms, idempotency_key="k", parent="p", max_output=9, hint_depth=1
    )
    seen = set(redis_client.hkeys(KEYS.job(job_id)))
    two = shard.REQUEST.model_copy(update={"params": sampling.SamplingParams(n=2)})
    several = calls.NewJob(new_job_id(), two)
    run(redis_client, calls.submit(KEYS, several))
    seen |= set(redis_client.hkeys(KEYS.job(several.job_id)))
    shard.nack(redis_client, job_id, shard.dispatch(redis_client, job_id, epoch).fence)
    redis_client.zadd(KEYS.delayed, {job_id: 1})
    shard.promote(redis_client, job_id)
    fence = shard.dispatch(redis_client, job_id, epoch).fence
    shard.claim(redis_client, job_id, fence)
    shard.append(redis_client, job_id, fence, 0, 1)
    seen |= set(redis_client.hkeys(KEYS.job(job_id)))
    shard.finish(redis_client, job_id, fence, 1)
    seen |= set(redis_client.hkeys(KEYS.job(job_id)))
    assert {name.decode() for name in seen} == documented


MESSAGES = [
    messages.GenerateRequest,
    requests.EmbedRequest,
    requests.ScoreRequest,
    requests.TranscribeRequest,
    outcomes.Outcome,
    outcomes.Vectors,
    outcomes.Transcript,
    outcomes.Segment,
    outcomes.Word,
    sampling.SamplingParams,
    sampling.RepetitionDetection,
    logprobs.TokenLogprobs,
    messages.TokenChunk,
    messages.JobEnd,
    messages.ChoiceEnd,
    messages.ChoiceOutput,
    messages.Usage,
    messages.JobResult,
    messages.WorkerInfo,
    messages.ModelCard,
    SamplingDefaults,
    messages.WorkerStatus,
    messages.FinishedSequence,
    messages.KvEvents,
    messages.KvSnapshot,
    StepFeatures,
    StepCost,
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_field_of_a_message_is_documented(message: type[WireModel]) -> None:
    [row] = [row for row in rows("## Messages") if row[0] == f"`{message.__name__}`"]
    documented = re.findall(r"`(\w+)`", row[1])
    assert set(message.model_fields) <= set(documented)


def test_every_term_is_documented() -> None:
    documented = {name for row in rows("## Messages") for name in re.findall(r"`(\w+)`", row[0])}
    assert set(JobTerms.model_fields) <= documented


def test_every_error_code_is_documented() -> None:
    documented = {row[0].strip("`").split()[0] for row in rows("### Errors")}
    assert set(_ERRORS) | {"NOSALT", "OOM"} <= documented


REF = JobRef("job", QUEUE)
END = JobEnd(state="dead")
CHUNK = TokenChunk(start=0, end=0)
INFO = WorkerInfo(
    worker_id="w",
    model="m",
    num_blocks=1,
    max_num_seqs=1,
    max_num_batched_tokens=1,
    wire_version=1,
)
CARD = ModelCard(name="m", revision="r", tokenizer_digest="t", max_model_len=1, vocab_size=1)
FILE = StoredFile("f", 1, "n", "batch")
BATCH = NewBatch("b", "/v1/completions", "f", "24h", 86400)
EXAMPLES: list[Call[object]] = [
    calls.submit(KEYS, calls.NewJob("job", shard.REQUEST)),
    calls.admit(KEYS, calls.NewJob("job", shard.REQUEST), epoch=1, entry_id="1-1"),
    calls.refuse(KEYS, REF, epoch=1, end=END),
    calls.deregister(KEYS, worker_id="w", cursor="0-0"),
    calls.salt(KEYS, tenant="t", random=b""),
    calls.close_batch(KEYS, tenant="t", batch="b", state="closed"),
    calls.cancel(KEYS, REF, worker_id="w", end=END),
    calls.lead(KEYS, scheduler_id="s", lease_ms=1),
    calls.dispatch(
        KEYS, job_id="job", queue=QUEUE, entry_id="1-1", worker_id="w", epoch=1, lease_ms=1
    ),
    calls.promote(KEYS, job_id="job", queue=QUEUE),
    calls.expire(KEYS, REF, worker_id="w"),
    calls.reap(KEYS, REF, end=END),
    calls.answer(KEYS, entry_id="1-1", reply=b""),
    calls.bury(KEYS, queue=QUEUE, entry_id="1-1", job_id=b"job", reason="odd"),
    calls.retire(KEYS, QUEUE),
    calls.measure(KEYS, calls.Measures(1, 1, 1, 1, "fast", "r")),
    calls.register(KEYS, info=INFO, card=CARD, tokenizer=b"", lease_ms=1),
    calls.report(KEYS, worker_id="w", status=WorkerStatus()),
    calls.hint(KEYS, worker_id="w", refs={bytes(8): 1}),
    calls.finish(KEYS, REF, fence=1, worker_id="w", chunk=CHUNK, result=JobResult(end=END)),
    calls.nack(KEYS, REF, fence=1, worker_id="w", error="e", pause=RetryPause()),
    calls.release(KEYS, job_id="job", fence=1, worker_id="w", queue=QUEUE),
    calls.drop_letter(KEYS, REF, entry_id="1-1", with_job=True),
    calls.put_file(KEYS, "t", FILE, ttl_ms=1),
    calls.drop_file(KEYS, "t", "f"),
    calls.create_batch(KEYS, "t", BATCH),
    calls.stop_batch(KEYS, "t", "b", output_id="f", error_id="f"),
    calls.lease_batch(KEYS, "t", "b", owner="o", lease_ms=1),
    calls.turn_batch(KEYS, "t", "b", owner="o", was="failed", becomes="failed"),
    calls.part_batch(
        KEYS, "t", "b", owner="o", number=0, num_answered=0, num_failed=0, usage=NO_USAGE
    ),
    responses.put_response(KEYS, "t", "job", b"", ttl_ms=1),
    responses.end_response(KEYS, "t", "job", ttl_ms=1),
    responses.drop_response(KEYS, "t", "job"),
    webhooks.edit_hook(KEYS, tenant="t", field="cb", expected="", new="[]"),
    webhooks.test_hook(KEYS, tenant="t", endpoint_id="we_1", event_id="evt_1"),
    webhooks.take_delivery(
        KEYS,
        delivery_id="d",
        tenant="t",
        circuit="c",
        lease_ms=1,
        max_in_flight=1,
        pause_ms=1,
        failures_to_open=1,
    ),
    webhooks.mark_delivery(
        KEYS,
        delivery_id="d",
        taken=webhooks.Taken(1, 1, 0, 1, "t", "we_1", "u", "c", "evt_1", b""),
        mark=webhooks.Mark(webhooks.Outcome.RETRY, "{}", webhooks.Counts.FAILURE),
    ),
    webhooks.hand_delivery(KEYS, delivery_id="d", attempts=0, hands=0, wait_ms=1),
    webhooks.replay_delivery(KEYS, delivery_id="d"),
    webhooks.serve_hooks(KEYS, worker_id="w", ttl_ms=1),
]


@pytest.mark.parametrize("call", EXAMPLES, ids=lambda call: call.name)
def test_the_keys_and_arguments_of_a_function_are_as_documented(call: Call[object]) -> None:
    table = {row[0]: row for row in rows("### Arguments and replies")}
    _, keys, arguments, _ = table[call.name]
    if keys == "as cancel":
        keys = table["cancel"][1]
    names = re.findall(r"`([^`]+)`", keys)
    given = call.keys[NUM_ENDING_KEYS * keys.startswith("ending keys") :]
    kinds = [name.removeprefix(KEYS.prefix).partition(":")[0] for name in given]
    assert kinds == [re.split(r"[:.]", name)[0] for name in names]
    assert len(call.args) == len(arguments.split(","))


def test_every_function_has_its_arguments_documented() -> None:
    registered = set(re.findall(r"^register_function\('(\w+)'", LUA_SOURCE, re.MULTILINE))
    assert {row[0] for row in rows("### Arguments and replies")} - {"function"} == registered


def test_the_ending_keys_are_as_documented() -> None:
    said = PAGE.split("**ending keys**")[1].split("They follow")[0]
    names = [re.split(r"[:.]", name)[0] for name in re.findall(r"`([^`]+)`", said)]
    call = calls.finish(KEYS, REF, fence=1, worker_id="w", chunk=CHUNK, result=JobResult(end=END))
    kinds = [name.removeprefix(KEYS.prefix).partition(":")[0] for name in call.keys]
    assert names == kinds and len(kinds) == NUM_ENDING_KEYS
