"""How many answers a job may ask for, and what it may ask of them."""

import pytest
from pydantic import ValidationError

from tidemill._follow import stored_chunks
from tidemill.protocol.codec import decode, encode
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import (
    ChoiceEnd,
    ChoiceOutput,
    GenerateRequest,
    JobEnd,
    JobResult,
    ModelCard,
    TokenChunk,
)
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.structured import StructuredOutput
from tidemill.result import from_log, from_stored
from tidemill.service.prompt import most_tokens, prepare, validate

CARD = ModelCard(name="m", revision="r", tokenizer_digest="t", max_model_len=100, vocab_size=50)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 0}, "greater than or equal to 1"),
        ({"n": 129}, "less than or equal to 128"),
        ({"n": 3, "best_of": 2}, "best_of: 2 is less than n 3"),
        ({"n": 2, "temperature": 0.0}, "n: it must be 1 when temperature is 0"),
        ({"best_of": 2, "temperature": 0.0}, "best_of: it must be 1 when temperature is 0"),
        ({"length_penalty": 2.0}, "of use_beam_search alone"),
        ({"early_stopping": True}, "of use_beam_search alone"),
        ({"use_beam_search": True, "early_stopping": "maybe"}, "never"),
        ({"use_beam_search": True, "length_penalty": float("inf")}, "finite"),
        ({"use_beam_search": True, "length_penalty": 10.5}, "less than or equal to 10"),
        ({"use_beam_search": True, "length_penalty": -1e308}, "greater than or equal to -10"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature: it has no effect"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p: it has no effect"),
        ({"use_beam_search": True, "stop": ("a",)}, "stop: it has no effect"),
        ({"use_beam_search": True, "logit_bias": {1: 1.0}}, "logit_bias: it has no effect"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs: it has no effect"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SamplingParams.model_validate(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 8},
        {"n": 1, "best_of": 1, "temperature": 0.0},
        {"n": 2, "use_beam_search": True, "temperature": 0.0},
        {"best_of": 4, "use_beam_search": True, "length_penalty": 0.0, "early_stopping": "never"},
    ],
)
def test_what_goes_together_survives_the_wire(fields: dict[str, object]) -> None:
    params = SamplingParams.model_validate(fields)
    assert decode(encode(params), SamplingParams) == params


def test_a_structure_does_not_go_with_beams() -> None:
    with pytest.raises(ValidationError, match="a beam search keeps to no structure"):
        GenerateRequest(
            model="m",
            prompt="a",
            params=SamplingParams(use_beam_search=True),
            structured=StructuredOutput(json_object=True),
        )


@pytest.mark.parametrize(
    ("fields", "field"), [({"n": 9}, "params.n"), ({"n": 2, "best_of": 9}, "params.best_of")]
)
def test_the_workers_set_how_many_there_may_be(fields: dict[str, int], field: str) -> None:
    request = GenerateRequest(model="m", prompt_ids=(1,), params=SamplingParams(**fields))
    with pytest.raises(InvalidRequest, match="9 outputs exceed the limit of 8") as refused:
        validate(request, 1, CARD)
    assert refused.value.field == field
    validate(request, 1, CARD.model_copy(update={"max_n": 9}))


def test_all_outputs_count_but_the_prompt_once() -> None:
    params = SamplingParams(n=2, best_of=4, max_tokens=10)
    request = GenerateRequest(model="m", prompt_ids=(1, 2, 3), params=params)
    assert most_tokens(request, CARD) == 3 + 4 * 10
    assert prepare(request, None, CARD, b"").max_output == 40


CHUNKS = [
    TokenChunk(start=0, end=2, ids=(1, 2), text="ab"),
    TokenChunk(start=2, end=3, ids=(7,), text="x", choice=1),
    TokenChunk(start=3, end=5, ids=(8, 9), text="yz", choice=1),
    TokenChunk(start=5, end=6, ids=(3,), text="c"),
]
END = JobEnd(
    state="done",
    finish_reason="stop",
    choices=(ChoiceEnd(finish_reason="stop"), ChoiceEnd(finish_reason="length", score=-0.5)),
)
STORED = JobResult(
    end=END,
    ids=(1, 2, 3),
    text="abc",
    entries=((2, 2), (3, 1), (5, 2), (6, 1)),
    others=(ChoiceOutput(ids=(7, 8, 9), text="xyz"),),
    entry_choices=(0, 1, 1, 0),
)


def test_a_stored_result_gives_the_chunks_of_the_log() -> None:
    stored = decode(encode(STORED), JobResult)
    given = [(c.start, c.end, c.ids, c.text, c.choice) for c in stored_chunks(stored)]
    assert given == [(c.start, c.end, c.ids, c.text, c.choice) for c in CHUNKS]


def test_a_stored_result_without_boundaries_gives_one_chunk_per_choice() -> None:
    bare = STORED.model_copy(update={"entries": (), "entry_choices": ()})
    given = [(c.start, c.end, c.ids, c.text, c.choice) for c in stored_chunks(bare)]
    assert given == [(0, 3, (1, 2, 3), "abc", 0), (3, 6, (7, 8, 9), "xyz", 1)]


def test_log_and_stored_result_have_the_same_choices() -> None:
    stored = from_stored("job", STORED)
    told = from_log("job", END, CHUNKS)
    assert told.choices == stored.choices
    assert [choice.text for choice in told.choices] == ["abc", "xyz"]
    assert [choice.score for choice in told.choices] == [None, -0.5]
    assert told.usage.completion_tokens == 6


def test_a_job_of_one_answer_has_one_choice() -> None:
    end = JobEnd(state="done", finish_reason="stop", stop_reason=5)
    result = from_stored("job", JobResult(end=end, ids=(1,), text="a"))
    [choice] = result.choices
    assert (choice.index, choice.text, choice.token_ids) == (0, "a", (1,))
    assert (choice.finish_reason, choice.stop_reason) == ("stop", 5)
