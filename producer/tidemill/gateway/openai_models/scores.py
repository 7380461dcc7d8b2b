"""``/v1/score`` and ``/v1/rerank``."""

from typing import Any, Literal

from pydantic import Field

from tidemill.gateway.openai_models.base import ApiRequest, ApiResponse
from tidemill.gateway.openai_models.embeddings import EncoderRequest, InputUsage

Texts = str | list[str]


class ScoringRequest(EncoderRequest):
    """What both share; ``activation`` is vLLM's older name of ``use_activation``."""

    use_activation: bool | None = None
    activation: bool | None = None


class ScoreRequest(ScoringRequest):
    """Pairs of texts: one with each of several, or as many firsts as seconds.

    The names ``queries`` and ``documents`` are taken for ``text_1`` and ``text_2`` too.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class Score(ApiResponse):
    """How well the second text of a pair answers the first; more is better."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(ApiResponse):
    """One score per pair, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: InputUsage


class TextDocument(ApiRequest):
    """A document in an object."""

    text: str


class RerankRequest(ScoringRequest):
    """Documents to be put in order; ``top_n`` 0 keeps all of them."""

    query: str
    documents: list[str | TextDocument]
    top_n: int = Field(default=0, ge=0)
    return_documents: bool = True
    max_tokens_per_doc: Any = None


class RankedText(ApiResponse):
    """What a document says."""

    text: str


class RankedDocument(ApiResponse):
    """A document's place in what was sent, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankUsage(ApiResponse):
    """Tokens of the query with each document."""

    prompt_tokens: int
    total_tokens: int


class Ranking(ApiResponse):
    """Documents, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage
