"""Embeddings and scores through broker, scheduler and worker, against transformers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional

from support.model_wheels import MINILM
from support.processes import sandbox
from support.small_stacks import small_stack
from support.tiny_encoders import make_tokenizer, save_bert, save_cross_encoder
from tidemill import (
    AsyncProducer,
    Embeddings,
    EmbedSpec,
    IdempotencyConflict,
    InvalidRequest,
    JobSpec,
    JobState,
    Producer,
    ScoreSpec,
)
from tidemill.cli.stack import Stack
from tidemill.protocol.keys import ShardKeys
from tidemill.service.redis import connect

TEXTS = ("tide mill", "water wheel grain stone", "stone")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def stack(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with small_stack(bert, tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def producer(stack: Stack) -> Iterator[Producer]:
    with Producer(stack.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def expected(bert: Path) -> torch.Tensor:
    """The means [texts, size] of the hidden states of each text alone."""
    model = transformers.BertModel.from_pretrained(bert).eval()
    rows = []
    with torch.inference_mode():
        for text in TEXTS:
            ids = torch.tensor([make_tokenizer().encode(text).ids])
            rows.append(model(input_ids=ids).last_hidden_state[0].mean(dim=0))
    return torch.stack(rows)


def close(found: object, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-5, rtol=0)


def test_a_vector_comes_back_for_each_input(producer: Producer, expected: torch.Tensor) -> None:
    answer = producer.embed(list(TEXTS), timeout=60)
    close(answer.vectors, functional.normalize(expected, dim=-1))
    assert (answer.size, answer.usage.prompt_tokens) == (64, 4 + 6 + 3)
    assert torch.frombuffer(bytearray(answer.data), dtype=torch.float32).shape == (3 * 64,)
    close(producer.embed(TEXTS[0], normalize=False, timeout=60).vectors[0], expected[0])


def test_token_ids_give_the_vectors_of_their_text(producer: Producer) -> None:
    ids = make_tokenizer().encode(TEXTS[1]).ids
    of_ids, of_text = producer.embed(ids, timeout=60), producer.embed(TEXTS[1], timeout=60)
    assert of_ids.vectors == of_text.vectors


def test_fewer_dimensions_are_the_first_ones_made_long_again(
    producer: Producer, expected: torch.Tensor
) -> None:
    answer = producer.embed(TEXTS[0], dimensions=8, timeout=60)
    close(answer.vectors[0], functional.normalize(expected[0, :8], dim=0))


def test_a_model_for_embeddings_scores_by_cosine(
    producer: Producer, expected: torch.Tensor
) -> None:
    query, *documents = functional.normalize(expected, dim=-1)
    wanted = torch.stack([query @ document for document in documents])
    close(producer.score(TEXTS[0], TEXTS[1:], timeout=60).scores, wanted)
    best, other = producer.rerank(TEXTS[0], TEXTS[1:], timeout=60)
    assert best.score >= other.score
    assert {best.document, other.document} == set(TEXTS[1:])
    assert producer.rerank(TEXTS[0], TEXTS[1:], top_n=1, timeout=60) == [best]


def test_the_asynchronous_client_gets_the_same(stack: Stack, producer: Producer) -> None:
    async def ask() -> tuple[object, object, object]:
        async with AsyncProducer(stack.url, timeout=30) as client:
            vectors = (await client.embed(list(TEXTS), timeout=60)).vectors
            scores = (await client.score(TEXTS[0], TEXTS[1:], timeout=60)).scores
            return vectors, scores, await client.rerank(TEXTS[0], TEXTS[1:], timeout=60)

    vectors, scores, order = asyncio.run(ask())
    assert vectors == producer.embed(list(TEXTS), timeout=60).vectors
    assert scores == producer.score(TEXTS[0], TEXTS[1:], timeout=60).scores
    assert order == producer.rerank(TEXTS[0], TEXTS[1:], timeout=60)


def test_many_jobs_of_both_kinds_come_back_from_map(producer: Producer) -> None:
    specs = [EmbedSpec(text) for text in TEXTS * 20]
    results = list(producer.map([*specs, ScoreSpec(TEXTS[0], TEXTS[1:])], max_in_flight=16))
    vectors = [Embeddings.of(result).vectors[0] for result in results[:-1]]
    assert len(vectors) == 60
    # Whatever shared a batch with it.
    for index, vector in enumerate(vectors):
        torch.testing.assert_close(
            torch.tensor(vector), torch.tensor(vectors[index % 3]), atol=1e-5, rtol=0
        )
    assert results[-1].outcome is not None and len(results[-1].outcome.scores or ()) == 2


def test_a_job_of_a_kind_that_the_model_does_not_serve_is_refused_before_it_is_queued(
    producer: Producer,
) -> None:
    with pytest.raises(InvalidRequest, match="model for embed") as refused:
        producer.submit("tide mill")
    assert refused.value.field == "model"
    with pytest.raises(InvalidRequest, match="model for embed"):
        producer.transcribe(b"audio")


def test_a_text_that_is_too_long_is_refused_or_cut(producer: Producer) -> None:
    with pytest.raises(InvalidRequest, match=r"inputs\.1: 102 tokens"):
        producer.embed(["tide", "mill " * 100], timeout=60)
    cut = producer.embed("mill " * 100, truncate=True, timeout=60)
    assert cut.usage.prompt_tokens == 64
    assert cut.vectors == producer.embed("mill " * 62, timeout=60).vectors


def test_an_idempotency_key_finds_the_job_again_and_another_request_does_not_pass_for_it(
    producer: Producer,
) -> None:
    first = producer.embed("tide", idempotency_key="one", timeout=60)
    assert producer.embed("tide", idempotency_key="one", timeout=60).job_id == first.job_id
    with pytest.raises(IdempotencyConflict, match="another body"):
        producer.embed("mill", idempotency_key="one", timeout=60)


def test_a_delayed_job_can_be_cancelled(producer: Producer) -> None:
    [job] = producer.submit_many([EmbedSpec("tide", delay=600)])
    assert not isinstance(job, Exception)
    assert job.cancel() is JobState.CANCELLED


def test_a_bad_item_spoils_no_other(producer: Producer) -> None:
    outcomes = producer.submit_many([EmbedSpec(""), EmbedSpec("tide"), JobSpec("tide")])
    assert [isinstance(outcome, InvalidRequest) for outcome in outcomes] == [True, False, True]


@pytest.mark.slow
def test_a_cross_encoder_scores_and_its_activation_can_be_left_out(
    tmp_path: Path,
) -> None:
    directory = save_cross_encoder(tmp_path / "model")
    model = transformers.BertForSequenceClassification.from_pretrained(directory).eval()
    pairs = [make_tokenizer().encode(TEXTS[0], document) for document in TEXTS]
    with torch.inference_mode():
        logits = torch.stack(
            [
                model(
                    input_ids=torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])
                ).logits[0, 0]
                for pair in pairs
            ]
        )
    with small_stack(directory, tmp_path / "data") as running, Producer(running.url) as client:
        close(client.score(TEXTS[0], TEXTS, timeout=60).scores, logits.sigmoid())
        close(client.score(TEXTS[0], TEXTS, activate=False, timeout=60).scores, logits)
        order = [one.index for one in client.rerank(TEXTS[0], TEXTS, timeout=60)]
        assert order == logits.argsort(descending=True).tolist()
        with pytest.raises(InvalidRequest, match="model for score"):
            client.embed("tide", timeout=60)


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_puts_a_kitten_nearer_to_a_cat_than_to_stocks(tmp_path: Path) -> None:
    directory = MINILM.directory()
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply today."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    wanted = functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    with small_stack(directory, tmp_path) as running, Producer(running.url) as client:
        close(client.embed(texts, timeout=60).vectors, wanted)
        kitten, stocks = client.score(texts[0], texts[1:], timeout=60).scores
        ranking = client.rerank(texts[0], texts[1:], timeout=60)
    assert kitten > 0.5 > stocks + 0.3
    assert ranking[0].document == texts[1]


def test_the_commands_print_vectors_and_rankings(
    stack: Stack, producer: Producer, tmp_path: Path
) -> None:
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=stack.url) as box:
        vectors = box.run("embed", TEXTS[0], TEXTS[2], "--dimensions", "4")
        from_lines = box.run("embed", "--dimensions", "4", stdin=f"{TEXTS[0]}\n{TEXTS[2]}\n")
        ranking = box.run("score", TEXTS[0], *TEXTS[1:], "--top-n", "1")
        refused = box.run("submit", TEXTS[0])
    assert vectors.status == ranking.status == 0 and vectors.stdout == from_lines.stdout
    rows = [json.loads(line) for line in vectors.stdout.splitlines()]
    wanted = producer.embed([TEXTS[0], TEXTS[2]], dimensions=4, timeout=60).vectors
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(wanted), atol=1e-6, rtol=0)
    [best] = producer.rerank(TEXTS[0], TEXTS[1:], top_n=1, timeout=60)
    assert ranking.stdout == f"{best.score:.6f}\t{best.document}\n"
    assert refused.status == 1 and "model for embed" in refused.error


def test_a_raw_client_gets_vectors_through_the_front_door(
    stack: Stack, producer: Producer, expected: torch.Tensor
) -> None:
    keys = ShardKeys()
    body = {"request": {"kind": "embed", "inputs": [TEXTS[0]], "normalize": False}}
    with connect(stack.url) as client:
        entry_id = client.xadd(keys.front_door, {"v": "1", "body": json.dumps(body)}).decode()
        answer = client.blpop([keys.front_reply(entry_id)], 60)
        assert answer is not None
        job_id = json.loads(answer[1])["job"]
        bad = {"request": {"kind": "paint", "inputs": ["x"]}}
        entry_id = client.xadd(keys.front_door, {"v": "1", "body": json.dumps(bad)}).decode()
        refused = client.blpop([keys.front_reply(entry_id)], 60)
    # It came as text, so the scheduler counted its tokens.
    outcome = producer.result(job_id, timeout=60).outcome
    assert outcome is not None and outcome.vectors is not None
    close(outcome.vectors.rows()[0], expected[0])
    assert refused is not None and json.loads(refused[1])["error"]["field"] == "request.kind"
