"""Completions: texts, tokens and logprobs are the model's, in the shapes that clients read."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from gateway.client import ask, choices, stream
from gateway.conftest import MODEL, Site
from tidemill import Producer

PATH = "/v1/completions"
#: A prompt as token ids of the model's tokenizer, none of them special.
IDS = [71, 68, 75, 75, 78, 220, 86, 78, 81, 75, 67]


@cache
def reference(model_dir: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )


def true_logprobs(model_dir: Path, ids: list[int]) -> torch.Tensor:
    """What transformers thinks of the tokens behind each of ``ids``: [tokens, vocabulary]."""
    with torch.no_grad():
        logits = reference(model_dir)(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def test_a_greedy_completion_has_the_tokens_of_transformers(site: Site) -> None:
    told = ask(
        site, PATH, prompt=IDS, max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True
    )
    ids = told["choices"][0]["token_ids"]
    assert told["choices"][0]["prompt_token_ids"] == IDS and len(ids) == 12
    whole = IDS + ids
    best = true_logprobs(site.model_dir, whole).argmax(-1).tolist()
    assert ids == best[len(IDS) - 1 : -1]
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["prompt_tokens"] == len(IDS) and told["usage"]["completion_tokens"] == 12


def test_a_prompt_is_scored_as_lm_eval_needs_it(site: Site) -> None:
    prompts = [IDS, IDS[3:]]
    told = ask(site, PATH, prompt=prompts, echo=True, max_tokens=1, logprobs=1, temperature=0)
    assert [choice["index"] for choice in told["choices"]] == [0, 1]
    for ids, choice in zip(prompts, told["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(entries) for entries in logprobs.values()} == {len(ids) + 1}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        truth = true_logprobs(site.model_dir, ids)
        for place, token_id in enumerate(ids[1:], start=1):
            mine = logprobs["token_logprobs"][place]
            likeliest = max(logprobs["top_logprobs"][place].values())
            assert mine == pytest.approx(float(truth[place - 1, token_id]), abs=1e-4)
            assert likeliest == pytest.approx(float(truth[place - 1].max()), abs=1e-4)
            # Bit for bit: it is how lm-eval finds out whether a text is the greedy one.
            assert (mine == likeliest) == (int(truth[place - 1].argmax()) == token_id)
        assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())


def test_a_prompt_can_be_scored_without_a_word_of_output(site: Site) -> None:
    scored = ask(site, PATH, prompt="hello", echo=True, max_tokens=0, logprobs=0)["choices"][0]
    assert scored["text"] == "hello"
    assert scored["logprobs"]["tokens"] == list("hello")
    assert scored["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert all(-math.inf < each < 0 for each in scored["logprobs"]["token_logprobs"][1:])


def test_logprobs_are_those_of_the_sdk(site: Site, producer: Producer) -> None:
    options = {"max_tokens": 6, "temperature": 0.9, "seed": 5, "logprobs": 3, "ignore_eos": True}
    told = ask(site, PATH, prompt="hello", return_tokens_as_token_ids=True, **options)
    result = producer.submit("hello", **options).result()  # type: ignore[arg-type]  # a mixture
    assert result.logprobs is not None
    logprobs = told["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in result.token_ids]
    assert logprobs["token_logprobs"] == [each.logprob for each in result.logprobs]
    for place, each in enumerate(result.logprobs):
        expected = {f"token_id:{token_id}": value for token_id, value in each.top}
        expected.setdefault(f"token_id:{result.token_ids[place]}", each.logprob)
        assert logprobs["top_logprobs"][place] == expected


def test_choices_of_several_prompts_come_in_order(site: Site, producer: Producer) -> None:
    options = {"max_tokens": 5, "temperature": 1.0, "seed": 11, "n": 2, "ignore_eos": True}
    prompts = ["ab", "hello", "c"]
    told = ask(site, PATH, prompt=prompts, **options)
    results = [producer.submit(p, **options).result() for p in prompts]  # type: ignore[arg-type]
    expected = [choice.text for result in results for choice in result.choices]
    assert [choice["text"] for choice in told["choices"]] == expected
    assert [choice["index"] for choice in told["choices"]] == list(range(6))
    assert told["usage"]["prompt_tokens"] == sum(r.usage.prompt_tokens for r in results)
    assert told["usage"]["completion_tokens"] == 30


def test_a_stream_tells_what_the_whole_answer_tells(site: Site) -> None:
    body = {"prompt": ["hello", "ab"], "max_tokens": 20, "seed": 3, "n": 2, "ignore_eos": True}
    whole = ask(site, PATH, **body, logprobs=1)
    events = stream(site, PATH, **body, logprobs=1, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        parts = list(choices(events, choice["index"]))
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts[-2:]] == [None, "length"]
        for name, entries in choice["logprobs"].items():
            told = [entry for p in parts if p["logprobs"] for entry in p["logprobs"][name]]
            assert told == entries
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all("usage" not in event for event in events[:-1])


def test_an_event_has_as_many_tokens_as_are_asked_for(site: Site) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "seed": 3, "ignore_eos": True}
    whole = ask(site, PATH, **body, return_token_ids=True)["choices"][0]
    events = stream(site, PATH, **body, return_token_ids=True, stream_interval=8)
    parts = [part for part in choices(events) if part.get("token_ids")]
    assert [i for part in parts for i in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["text"] for part in choices(events)) == whole["text"]
    assert all(len(part["token_ids"]) >= 8 for part in parts[1:-1])


def test_an_echo_is_streamed_first(site: Site) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "seed": 3, "echo": True}
    whole = ask(site, PATH, **body)
    events = stream(site, PATH, **body)
    assert events[0]["choices"][0]["text"] == "hello"
    assert "".join(part["text"] for part in choices(events)) == whole["choices"][0]["text"]
    scored = stream(site, PATH, **body, logprobs=0)
    assert scored[0]["choices"] == ask(site, PATH, **body, logprobs=0)["choices"]


def test_usage_can_be_told_all_along(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(site, PATH, prompt="hello", max_tokens=40, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == events[-1]["usage"]["completion_tokens"] > 0
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}


def test_the_best_of_several_is_told(site: Site, producer: Producer) -> None:
    options = {"max_tokens": 5, "seed": 2, "n": 1, "best_of": 4, "ignore_eos": True}
    told = ask(site, PATH, prompt="hello", **options)
    result = producer.submit("hello", **options).result()  # type: ignore[arg-type]
    assert [choice["text"] for choice in told["choices"]] == [result.text]
    assert told["usage"]["completion_tokens"] == 20


def test_prompts_are_cut_and_tokenised_as_asked(site: Site) -> None:
    told = ask(site, PATH, prompt="hello", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert told["choices"][0]["text"].startswith("lo") and told["usage"]["prompt_tokens"] == 2


def test_nulls_and_unknown_fields_count_as_left_out(site: Site) -> None:
    empty = dict.fromkeys(["seed", "logprobs", "stop", "best_of", "stream", "n", "suffix"])
    told = ask(site, PATH, prompt=["hi"], **empty, surprise={"x": 1}, max_tokens=2)
    assert told["object"] == "text_completion" and told["model"] == MODEL
    assert told["id"].startswith("cmpl-")
