"""From the fields of a request to the options of its jobs; pure."""

from hashlib import sha256
from typing import Any

from tidemill._request import JobOptions
from tidemill.gateway.openai_models.sampling import GenerationRequest
from tidemill.openai.response_format import structured_fields

#: Fields that jobs have under the same name.
_SAME = (
    *("model", "n", "best_of", "use_beam_search", "length_penalty", "min_tokens"),
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
    *("logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "prompt_logprobs"),
    *("repetition_detection", "thinking_token_budget"),
    *("priority", "deadline", "cache_salt", "callback_url", "metadata"),
)

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}

_MAX_NAME_CHARS = 128


def job_options(body: GenerationRequest) -> JobOptions:
    """Return the options of the request's jobs, but for what depends on the endpoint."""
    fields = {name: getattr(body, name) for name in _SAME}
    options: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if body.seed is not None and body.seed != -1:
        # Half of the seeds that clients may send are below zero, ours are not.
        options["seed"] = body.seed % 2**63
    if name := body.prompt_cache_key or body.session_id:
        options["prefix_id"] = _short(name)
    options["stream"] = body.stream
    taken: JobOptions = options  # type: ignore[assignment]  # checked where the job is made
    return taken


def answer_form(body: GenerationRequest) -> dict[str, Any] | None:
    """Return the fields of ``StructuredOutput`` that a request asks for; None for free text.

    Raises ``InvalidRequest`` naming the field that is wrong.
    """
    asked = {
        "response_format": body.response_format,
        "structured_outputs": body.structured_outputs,
    }
    guided = {
        kind: value for name, kind in _GUIDED.items() if (value := getattr(body, name)) is not None
    }
    if guided and asked["structured_outputs"] is None:
        asked["structured_outputs"] = guided
    return structured_fields(asked)


def form_field(body: GenerationRequest) -> str:
    """Return the field of a request that says which form its answer has."""
    return "structured_outputs" if body.response_format is None else "response_format"


def key_of_job(key: str | None, index: int, identity: bytes) -> str | None:
    """Return the idempotency key of one of a request's jobs, given the request's.

    The first one has the request's own, which is where another request with it is noticed; the keys
    of the others are of this body alone, so that two requests never share some of their jobs.
    """
    if key is None or index == 0:
        return key
    return f"{sha256(key.encode('utf-8', 'replace') + identity).hexdigest()}/{index}"


def _short(name: str) -> str:
    if len(name) <= _MAX_NAME_CHARS:
        return name
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
