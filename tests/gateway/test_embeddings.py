"""Vectors and scores over HTTP: those of the SDK, in the shapes that clients read."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from gateway.client import post
from gateway.conftest import MODEL, Site
from gateway.document import check
from gateway.workers import worker
from openai import OpenAI
from support.tiny_encoders import MAX_POSITIONS, make_tokenizer, save_bert, save_cross_encoder
from tidemill import Producer

TEXTS = ["tide mill", "water wheel grain stone", "stone"]
QUERY = "water mill"


@pytest.fixture(scope="module", autouse=True)
def encoders(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model for vectors, ``bert``, and one that compares texts, ``judge``."""
    bert = save_bert(tmp_path_factory.mktemp("bert"))
    judge = save_cross_encoder(tmp_path_factory.mktemp("judge"))
    with worker(site.stack.url, bert, "bert"), worker(site.stack.url, judge, "judge"):
        yield


@pytest.fixture
def client(site: Site) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as openai:
        yield openai


def tell(site: Site, path: str, **body: Any) -> dict[str, Any]:
    answer = post(site, path, body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    check(site.url, path, told)
    return told


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_the_client_of_openai_gets_the_vectors_of_the_sdk(
    client: OpenAI, producer: Producer
) -> None:
    # It asks for base64 by itself and decodes it.
    told = client.embeddings.create(model="bert", input=TEXTS)
    true = producer.embed(TEXTS, model="bert")
    assert [tuple(each.embedding) for each in told.data] == list(true.vectors)
    assert [each.index for each in told.data] == [0, 1, 2]
    assert told.usage.prompt_tokens == told.usage.total_tokens == true.usage.prompt_tokens == 13
    assert told.model == "bert" and told.object == "list"


def test_vectors_come_as_numbers_or_as_little_endian_floats(site: Site, producer: Producer) -> None:
    true = producer.embed(TEXTS, model="bert")
    numbers = tell(site, "/v1/embeddings", model="bert", input=TEXTS)
    coded = tell(site, "/v1/embeddings", model="bert", input=TEXTS, encoding_format="base64")
    assert [tuple(each["embedding"]) for each in numbers["data"]] == list(true.vectors)
    rows = [base64.b64decode(each["embedding"]) for each in coded["data"]]
    assert b"".join(rows) == true.data
    assert tuple(np.frombuffer(rows[1], "<f4").tolist()) == true.vectors[1]


def test_token_ids_have_the_vectors_of_their_texts(site: Site, producer: Producer) -> None:
    ids = [make_tokenizer().encode(text).ids for text in TEXTS]
    true = producer.embed(TEXTS, model="bert").vectors
    several = tell(site, "/v1/embeddings", model="bert", input=ids)["data"]
    single = tell(site, "/v1/embeddings", model="bert", input=ids[0])["data"]
    assert [tuple(each["embedding"]) for each in several] == list(true)
    assert [tuple(each["embedding"]) for each in single] == [true[0]]
    mixed = tell(site, "/v1/embeddings", model="bert", input=[TEXTS[0], ids[1]])["data"]
    assert [tuple(each["embedding"]) for each in mixed] == list(true[:2])


def test_vectors_can_be_shortened_and_left_at_their_length(
    client: OpenAI, site: Site, producer: Producer
) -> None:
    short = client.embeddings.create(model="bert", input=TEXTS[0], dimensions=8).data[0].embedding
    true = np.array(producer.embed(TEXTS[0], model="bert", normalize=False).vectors[0])
    np.testing.assert_allclose(short, true[:8] / np.linalg.norm(true[:8]), atol=1e-6)
    raw = tell(site, "/v1/embeddings", model="bert", input=TEXTS[0], normalize=False)
    assert raw["data"][0]["embedding"] == true.tolist()
    error = refusal(post(site, "/v1/embeddings", {"model": "bert", "input": "x", "dimensions": 65}))
    assert error["param"] == "dimensions" and "64" in error["message"]


def test_long_inputs_are_cut_where_that_is_asked_for_and_else_refused(
    site: Site, producer: Producer
) -> None:
    long = "tide " * (MAX_POSITIONS + 10)
    error = refusal(post(site, "/v1/embeddings", {"model": "bert", "input": ["x", long]}))
    assert error["param"] == "input.1" and str(MAX_POSITIONS) in error["message"]
    whole = tell(site, "/v1/embeddings", model="bert", input=long, truncate_prompt_tokens=-1)
    true = producer.embed(long, model="bert", truncate=True)
    assert tuple(whole["data"][0]["embedding"]) == true.vectors[0]
    assert whole["usage"]["prompt_tokens"] == MAX_POSITIONS
    # [CLS] and [SEP] are among the five tokens that are kept.
    cut = tell(site, "/v1/embeddings", model="bert", input=long, truncate_prompt_tokens=5)
    assert cut["usage"]["prompt_tokens"] == 5
    assert (
        tuple(cut["data"][0]["embedding"])
        == producer.embed("tide tide tide", model="bert").vectors[0]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", {"b": 1}]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": [-1]}, "input.0"),
        ({"input": [10**6]}, "input.0"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 3, "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "model": MODEL}, "model"),
    ],
)
def test_a_wrong_request_for_vectors_names_its_field(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    error = refusal(post(site, "/v1/embeddings", {"model": "bert", **fields}))
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_a_request_that_is_sent_again_with_its_key_is_one_job(site: Site) -> None:
    body = {"model": "bert", "input": TEXTS}
    headers = {"Idempotency-Key": "vectors-1"}
    answers = [post(site, "/v1/embeddings", body, **headers).json() for _ in range(2)]
    assert answers[0]["id"] == answers[1]["id"]
    other = post(site, "/v1/embeddings", {**body, "input": "x"}, **headers)
    assert refusal(other, 409)["code"] == "idempotency_conflict"


@pytest.mark.parametrize("model", ["bert", "judge"])
def test_documents_come_back_in_the_order_of_the_sdk(
    site: Site, producer: Producer, model: str
) -> None:
    true = producer.rerank(QUERY, TEXTS, model=model)
    body: dict[str, Any] = {"model": model, "query": QUERY, "documents": TEXTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        told = tell(site, path, **body)
        found = [(each["index"], each["relevance_score"]) for each in told["results"]]
        assert found == [(each.index, each.score) for each in true]
        texts = [each["document"]["text"] for each in told["results"]]
        assert texts == [each.document for each in true]
    usage = producer.score(QUERY, TEXTS, model=model).usage.prompt_tokens
    assert told["usage"] == {"prompt_tokens": usage, "total_tokens": usage}
    objects = [{"text": text} for text in TEXTS]
    short = tell(site, path, **body | {"documents": objects, "top_n": 2, "return_documents": False})
    assert short["results"] == [
        {"index": each.index, "relevance_score": each.score} for each in true[:2]
    ]


def test_pairs_are_scored_one_with_each_and_one_with_one(site: Site, producer: Producer) -> None:
    def scores(**texts: Any) -> list[float]:
        told = tell(site, "/v1/score", model="judge", **texts)
        assert [each["index"] for each in told["data"]] == list(range(len(told["data"])))
        return [each["score"] for each in told["data"]]

    true = list(producer.score(QUERY, TEXTS, model="judge").scores)
    assert scores(text_1=QUERY, text_2=TEXTS) == pytest.approx(true, abs=1e-6)
    assert scores(queries=[QUERY], documents=TEXTS) == pytest.approx(true, abs=1e-6)
    assert scores(text_1=QUERY, text_2=TEXTS[1]) == pytest.approx([true[1]], abs=1e-6)
    first = ["tide", "tide", "stone"]
    pairs = [producer.score(*pair, model="judge").scores[0] for pair in one_by_one(first)]
    assert scores(text_1=first, text_2=TEXTS) == pytest.approx(pairs, abs=1e-6)
    raw = producer.score(QUERY, TEXTS, model="judge", activate=False).scores
    found = scores(text_1=QUERY, text_2=TEXTS, use_activation=False)
    assert found == pytest.approx(list(raw), abs=1e-6)
    assert tell(site, "/score", model="judge", text_1="x", text_2="y")["object"] == "list"


def one_by_one(first: list[str]) -> Iterator[tuple[str, list[str]]]:
    for one, other in zip(first, TEXTS, strict=True):
        yield one, [other]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", ""]}, "text_2.1"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/v1/score", {"queries": "a", "documents": ["b", "tide " * 90]}, "documents.1"),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 9},
            "truncate_prompt_tokens",
        ),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
        ),
    ],
)
def test_a_wrong_request_for_scores_names_its_field(
    site: Site, path: str, fields: dict[str, Any], param: str
) -> None:
    assert refusal(post(site, path, {"model": "judge", **fields}))["param"] == param


def test_documents_that_are_too_long_can_be_cut(site: Site, producer: Producer) -> None:
    documents = ["tide " * 90, "mill"]
    body = {"query": "stone", "documents": documents, "truncate_prompt_tokens": -1}
    told = tell(site, "/v1/rerank", model="judge", **body)
    true = producer.rerank("stone", documents, model="judge", truncate=True)
    assert [each["index"] for each in told["results"]] == [each.index for each in true]


def test_a_model_for_vectors_does_not_chat_and_one_for_chats_makes_no_vectors(site: Site) -> None:
    hello = [{"role": "user", "content": "x"}]
    chat = refusal(post(site, "/v1/chat/completions", {"model": "bert", "messages": hello}))
    response = refusal(post(site, "/v1/responses", {"model": "bert", "input": "x"}))
    vectors = refusal(post(site, "/v1/embeddings", {"model": MODEL, "input": "x"}))
    for error, task in ((chat, "embed"), (response, "embed"), (vectors, "generate")):
        assert error["param"] == "model" and f"is a model for {task}" in error["message"]
