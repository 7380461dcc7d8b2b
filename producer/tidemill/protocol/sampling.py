"""How the tokens of a job are chosen and when they end."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tidemill.protocol.complaints import field_error
from tidemill.protocol.values import AnyText, Count, TokenId, TokenIds
from tidemill.protocol.wire_model import WireModel

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 100.0
#: The largest exponent of the length in a beam's score, either way: no context is so long that its
#: power or a score leaves the range of float64.
MAX_LENGTH_PENALTY = 10.0
#: The most outputs of one job that the wire carries.
MAX_N = 128
#: How many outputs of one job a worker computes, unless its operator says otherwise.
DEFAULT_MAX_N = 8
#: How many alternatives a worker tells of each token, unless its operator says otherwise.
DEFAULT_MAX_LOGPROBS = 20
#: Asks for the whole vocabulary where a number of logprobs is asked for.
ALL_LOGPROBS = -1


def _bias_pairs(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    # JSON knows no integers as keys.
    return tuple((_token_id(key), bias) for key, bias in value.items())


def _token_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


def _clamp_bias(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise ValueError("a token id occurs twice")
    clamped = ((t, max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))) for t, bias in pairs)
    return tuple(sorted(clamped))


LogitBias = Annotated[
    tuple[tuple[TokenId, float], ...], BeforeValidator(_bias_pairs), AfterValidator(_clamp_bias)
]
StopString = Annotated[AnyText, Field(min_length=1, max_length=MAX_STOP_CHARS)]
ThinkingBudget = Annotated[
    Annotated[Count, Field(ge=-1)] | None,
    AfterValidator(lambda value: None if value == -1 else value),
]
BadWord = Annotated[AnyText, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS, pattern=r"\S")]
NumOutputs = Annotated[int, Field(strict=True, ge=1, le=MAX_N)]
NumLogprobs = Annotated[Count, Field(ge=ALL_LOGPROBS)]


class RepetitionDetection(WireModel):
    """Ends an output whose last tokens are ``min_count`` times the same pattern.

    Patterns of ``min_pattern_size`` to ``max_pattern_size`` tokens count.
    """

    max_pattern_size: Annotated[int, Field(strict=True, ge=1, le=1024)]
    min_pattern_size: Count = Field(default=1, ge=1)
    min_count: Count = Field(default=2, ge=2)

    @model_validator(mode="after")
    def _sizes_in_order(self) -> "RepetitionDetection":
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size {self.min_pattern_size} exceeds max_pattern_size"
                f" {self.max_pattern_size}"
            )
        return self


class SamplingParams(WireModel):
    """How tokens are chosen; names, defaults and limits are vLLM's.

    ``max_tokens=None`` means up to the model's context.  ``top_k=0`` and ``-1`` switch top-k off.
    ``temperature=0`` is greedy.  ``logit_bias`` may be given as a mapping of token ids; it is kept
    as pairs, by id, each clamped to +-100.  ``logprobs`` and ``prompt_logprobs`` are the number of
    likeliest tokens told of each position beside its own, -1 for all of them.  Of ``best_of``
    outputs, ``n`` if it is None, the ``n`` likeliest are told; with ``use_beam_search`` they are
    the beams, rated by ``length_penalty``, and ``early_stopping`` says when to look for no more.
    After ``thinking_token_budget`` tokens of reasoning its end is forced; -1 is None.
    """

    n: NumOutputs = 1
    best_of: NumOutputs | None = None
    use_beam_search: bool = False
    length_penalty: float = Field(
        default=1.0, allow_inf_nan=False, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY
    )
    early_stopping: Annotated[bool, Field(strict=True)] | Literal["never"] = False
    max_tokens: Count | None = Field(default=None, ge=1)
    min_tokens: Count = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_k: Count = Field(default=0, ge=-1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    seed: Annotated[int, Field(strict=True)] | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    stop_token_ids: TokenIds = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: LogitBias = ()
    allowed_token_ids: TokenIds | None = Field(default=None, min_length=1)
    bad_words: tuple[BadWord, ...] = Field(default=(), max_length=MAX_BAD_WORDS)
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: TokenIds = Field(default=(), max_length=MAX_LOGPROB_TOKEN_IDS)
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: ThinkingBudget = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            told = f"{self.min_tokens} exceeds max_tokens {self.max_tokens}"
            raise field_error("min_tokens", told)
        if self.logprob_token_ids and self.logprobs is None:
            raise field_error("logprob_token_ids", "they need logprobs, which may be 0")
        check_outputs(self)
        return self

    @property
    def num_outputs(self) -> int:
        """How many outputs are computed, be they told or not."""
        return max(self.n, self.best_of or self.n)

    @property
    def is_told_at_end(self) -> bool:
        """Whether it shows at the end only which outputs are told."""
        return self.use_beam_search or self.num_outputs > self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred before are made less or more likely."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


def check_outputs(params: SamplingParams) -> None:
    """Raise ``ValueError`` if the number of outputs does not go with how they are chosen."""
    if params.best_of is not None and params.best_of < params.n:
        raise field_error("best_of", f"{params.best_of} is less than n {params.n}")
    if params.use_beam_search:
        _check_beams(params)
        return
    if params.length_penalty != 1.0 or params.early_stopping is not False:
        name = "early_stopping" if params.length_penalty == 1.0 else "length_penalty"
        raise field_error(name, "it is of use_beam_search alone")
    if params.num_outputs > 1 and params.is_greedy:
        name = "n" if params.n > 1 else "best_of"
        told = "it must be 1 when temperature is 0, or all outputs were the same"
        raise field_error(name, told)


#: What a beam search has no use for, and the values that do nothing.
_NOT_OF_BEAMS: Mapping[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0),
    "min_tokens": (0,),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "stop": ((),),
    "stop_token_ids": ((),),
    "logit_bias": ((),),
    "allowed_token_ids": (None,),
    "bad_words": ((),),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
}


def _check_beams(params: SamplingParams) -> None:
    for name, neutral in _NOT_OF_BEAMS.items():
        if getattr(params, name) not in neutral:
            raise field_error(name, "it has no effect on a beam search, so it may not be given")
