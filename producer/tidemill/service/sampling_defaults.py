"""Completes a new request's sampling with the defaults of its model: pure."""

from typing import Any

from pydantic import ValidationError

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import GenerateRequest, ModelCard, invalid_request
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.sampling_defaults import SamplingDefaults


def with_defaults(
    request: GenerateRequest, card: ModelCard, prompt_len: int | None
) -> GenerateRequest:
    """Return the request with the model's defaults for what its caller has left out.

    To be done once, before the request is queued: on the wire a default looks like a value that is
    left out.  ``prompt_len`` is None for a text that nobody has tokenised; it gets no default for
    ``max_tokens``, which elsewhere is what the context leaves room for at most.  Raises
    ``InvalidRequest`` if the request does not go with the defaults.
    """
    params, defaults = request.params, card.sampling_defaults
    found = _missing(params, defaults)
    room = 0 if prompt_len is None else card.max_model_len - prompt_len
    most = _max_tokens(params, defaults, room)
    if most is not None:
        found["max_tokens"] = most
    if not found:
        return request
    return request.model_copy(update={"params": _completed(params, found)})


def _missing(params: SamplingParams, defaults: SamplingDefaults) -> dict[str, Any]:
    if params.use_beam_search:
        return {}
    said = params.model_fields_set | {"max_tokens"}
    return {name: value for name, value in defaults.given.items() if name not in said}


def _max_tokens(params: SamplingParams, defaults: SamplingDefaults, room: int) -> int | None:
    if params.max_tokens is not None or defaults.max_tokens is None:
        return None
    most = min(defaults.max_tokens, room)
    # Too long a prompt, or too many tokens at least, are refused by their own names.
    return most if most >= max(1, params.min_tokens) else None


def _completed(params: SamplingParams, found: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.model_validate(params.model_dump() | found)
    except ValidationError as error:
        refused = invalid_request(error)
        raise InvalidRequest(
            f"{refused.message}; the model's own defaults are {_told(found)}",
            field=refused.field,
            fix="Say these parameters yourself.",
        ) from error


def _told(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())
