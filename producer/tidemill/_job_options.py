"""The options of jobs, checked once for all jobs of a call that share them; pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tidemill._checks import check_kinds
from tidemill._structured import take_structured
from tidemill._terms import take_terms
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import JobTerms, invalid_request
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.structured import StructuredOutput

_REQUEST_OPTIONS = frozenset({"priority", "cache_salt", "prefix_id", "lora", "stream"})

#: Each job has its own.
_KEY = "idempotency_key"


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """What the options of a job say, but for its idempotency key.

    ``own`` are those that requests have under the same name.
    """

    model: str | None
    own: Mapping[str, Any]
    terms: JobTerms
    structured: StructuredOutput | None
    params: SamplingParams


class SharedOptions:
    """Checks the options of one job after the other, during one call.

    Those of which each value is the very object that the job before had are not checked again.
    """

    def __init__(self) -> None:
        self._given: Mapping[str, object] = {}
        self._checked: CheckedOptions | None = None

    def check(self, options: Mapping[str, object]) -> CheckedOptions:
        """Return what the options say; raises ``InvalidRequest``."""
        given = {name: value for name, value in options.items() if name != _KEY}
        if self._checked is None or not _are_same(given, self._given):
            self._checked = None
            self._given, self._checked = given, _checked(given)
        return self._checked


def _are_same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _checked(options: Mapping[str, object]) -> CheckedOptions:
    fields: dict[str, Any] = {**options}
    model = fields.pop("model", None)
    own = {name: fields.pop(name) for name in _REQUEST_OPTIONS & fields.keys()}
    terms, structured = take_terms(fields), take_structured(fields)
    check_kinds({"model": model, **own, **fields})
    try:
        return CheckedOptions(model, own, terms, structured, _sampling_params(fields))
    except ValidationError as error:
        raise invalid_request(error) from error


def _sampling_params(options: dict[str, Any]) -> SamplingParams:
    params = options.pop("params", None)
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"params: {type(params).__name__} is not SamplingParams",
            field="params",
            fix="Give SamplingParams(...), or its fields as keyword arguments.",
        )
    # What it does not say itself has the model's default.
    given = {} if params is None else params.model_dump(exclude_unset=True)
    return SamplingParams(**{**given, **options})
