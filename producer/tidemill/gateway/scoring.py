"""What requests for scores and for rankings ask of the queue."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemill.gateway.call import Call
from tidemill.gateway.checks import refuse
from tidemill.gateway.embedding import cut_length, kind_options
from tidemill.gateway.kind_plans import KindPlan
from tidemill.gateway.openai_models.scores import RerankRequest, ScoreRequest, ScoringRequest
from tidemill.gateway.options import key_of_job
from tidemill.gateway.prompts import MAX_PROMPTS
from tidemill.gateway.shaping.encoders import ranking, score_list
from tidemill.job_kinds import ScoreSpec
from tidemill.outcomes import ranked, scores_of
from tidemill.protocol.messages import ModelCard
from tidemill.protocol.requests import MAX_INPUTS
from tidemill.result import Result

#: A query with the documents that it is compared with.
Task = tuple[str, tuple[str, ...]]


async def plan_scores(call: Call, body: ScoreRequest) -> KindPlan:
    """Return the jobs of a request, one for each run of pairs that share their first text.

    Raises ``InvalidRequest`` naming the field that is wrong.
    """
    names = ("text_1", "text_2") if body.queries is None else ("queries", "documents")
    given = [getattr(body, name) for name in names]
    for name, texts in zip(names, given, strict=True):
        if texts is None:
            raise refuse(name, "it is missing")
    first, second = ([each] if isinstance(each, str) else each for each in given)
    tasks = _tasks(first, second, names)
    card = await call.producer.model(body.model)
    model = body.model or card.name

    def answer(results: Sequence[Result]) -> Mapping[str, Any]:
        scores = (score for result in results for score in scores_of(result).scores)
        return score_list(results, scores, model)

    return KindPlan(_specs(call, body, card, tasks), answer, _Names(names, given[1], tasks).of)


async def plan_ranking(call: Call, body: RerankRequest) -> KindPlan:
    """Return the job of a request; raises ``InvalidRequest`` naming the field that is wrong."""
    if body.max_tokens_per_doc is not None:
        raise refuse(
            "max_tokens_per_doc",
            "documents can be cut to what the model takes alone",
            "Send truncate_prompt_tokens: -1.",
        )
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    card = await call.producer.model(body.model)
    model = body.model or card.name

    def answer(results: Sequence[Result]) -> Mapping[str, Any]:
        [result] = results
        best = ranked(documents, scores_of(result), body.top_n or None)
        return ranking(result, best, model, has_texts=body.return_documents)

    specs = _specs(call, body, card, [(body.query, tuple(documents))])
    return KindPlan(specs, answer, lambda _, field: field)


def _specs(
    call: Call, body: ScoringRequest, card: ModelCard, tasks: Sequence[Task]
) -> list[ScoreSpec]:
    limit = cut_length(body, card)
    if limit is not None and limit < card.max_model_len:
        raise refuse(
            "truncate_prompt_tokens",
            "what is compared can be cut to what the model takes alone",
            "Send -1.",
        )
    activate = body.activation if body.use_activation is None else body.use_activation
    specs = []
    for index, (query, documents) in enumerate(tasks):
        key = key_of_job(call.idempotency_key, index, call.identity_of_body)
        options = {**kind_options(body, key), "truncate": limit is not None}
        if activate is not None:
            options["activate"] = activate
        specs.append(ScoreSpec(query, documents, **options))
    return specs


def _tasks(first: list[str], second: list[str], names: tuple[str, str]) -> list[Task]:
    if not first or not second:
        raise refuse(names[0] if not first else names[1], "it is empty")
    if len(second) > MAX_INPUTS:
        raise refuse(names[1], f"there are {len(second)}, the limit is {MAX_INPUTS}")
    if len(first) not in (1, len(second)):
        raise refuse(
            names[0],
            f"{len(first)} texts go neither once with each of {len(second)} nor one with one",
            "Send one text, or as many as there are others.",
        )
    queries = first * len(second) if len(first) == 1 else first
    tasks = list(_runs(queries, second))
    if len(tasks) > MAX_PROMPTS:
        raise refuse(names[0], f"it has {len(tasks)} runs of one text, the limit is {MAX_PROMPTS}")
    return tasks


def _runs(queries: Sequence[str], documents: Sequence[str]) -> Iterator[Task]:
    start = 0
    for end in range(1, len(queries) + 1):
        if end == len(queries) or queries[end] != queries[start]:
            yield queries[start], tuple(documents[start:end])
            start = end


class _Names:
    """What a request calls the fields of its jobs."""

    def __init__(self, names: tuple[str, str], second: Any, tasks: Sequence[Task]) -> None:
        self._names, self._tasks = names, tasks
        self._is_list = not isinstance(second, str)

    def of(self, index: int, field: str) -> str:
        """Return the request's name of a field of the ``index``-th job."""
        first, *places = field.split(".")
        if first == "query":
            return self._names[0]
        if first != "documents":
            return field
        if not places or not self._is_list:
            return self._names[1]
        before = sum(len(documents) for _, documents in self._tasks[:index])
        return f"{self._names[1]}.{before + int(places[0])}"
