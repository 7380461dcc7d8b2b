"""From a request of a batch to jobs, and from their results to an answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill._request import JobSpec
from tidemill.result import Result


@dataclass(frozen=True, slots=True)
class Translated:
    """The jobs of one request, without keys and groups, and what makes an answer of their results.

    ``answer`` takes the results in the order of the jobs and returns the body of the response.
    ``prompt_field`` is the field of the request that jobs may know as token ids.
    """

    specs: Sequence[JobSpec]
    answer: Callable[[Sequence[Result]], Mapping[str, Any]]
    prompt_field: str = "prompt"


class Translator(Protocol):
    """Knows what the requests of an endpoint mean."""

    async def translate(self, endpoint: str, body: Mapping[str, Any]) -> Translated:
        """Return the jobs of a request.

        Raises ``InvalidRequest``, or what else says that the request cannot be answered; and
        ``BrokerUnavailable`` if nobody can tell.  The same body always means the same jobs.
        """
