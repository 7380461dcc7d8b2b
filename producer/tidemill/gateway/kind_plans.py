"""Jobs of other kinds than text: submitted, awaited, and told as a whole."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from tidemill.gateway.call import Call
from tidemill.gateway.disconnects import ClientGone, while_connected
from tidemill.gateway.errors import CLIENT_GONE_STATUS
from tidemill.gateway.jobs import RequestJobs, submit
from tidemill.job_kinds import KindSpec
from tidemill.result import Result


@dataclass(frozen=True, slots=True)
class KindPlan:
    """What is asked of the queue, and how the answer is made of the results.

    ``name_of`` turns the place of a job and one of its fields into what the request calls it.
    ``is_long`` tells that making the answer would hold up the event loop.
    """

    specs: Sequence[KindSpec]
    body: Callable[[Sequence[Result]], Mapping[str, Any]]
    name_of: Callable[[int, str], str]
    is_long: bool = False


async def answer_kind(call: Call, plan: KindPlan) -> Response:
    """Run a plan's jobs and tell their results.

    Raises what submitting and waiting for jobs raise.
    """
    jobs = await submit(call, plan.specs, plan.name_of)
    results = await results_of(call, jobs)
    if results is None:
        return Response(status_code=CLIENT_GONE_STATUS)
    if plan.is_long:
        data = await asyncio.to_thread(_encoded, plan, results)
    else:
        data = _encoded(plan, results)
    return Response(data, media_type="application/json")


async def results_of(call: Call, jobs: RequestJobs) -> list[Result] | None:
    """Wait for the results; None if the client left, for whom the jobs are cancelled then."""
    try:
        with jobs:
            async with while_connected(call.request.receive):
                results = await jobs.results()
    except ClientGone:
        return None
    prompt = sum(result.usage.prompt_tokens for result in results)
    call.state.metrics.tokens.labels("prompt").inc(prompt)
    return results


def _encoded(plan: KindPlan, results: Sequence[Result]) -> bytes:
    return orjson.dumps(plan.body(results))
