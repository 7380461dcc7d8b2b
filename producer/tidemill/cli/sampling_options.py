"""Options of the command line that say how tokens are chosen, beside the common ones."""

from typing import Annotated, Any, TypedDict

import typer

from tidemill.protocol.errors import ConfigError

PresencePenalty = Annotated[
    float | None,
    typer.Option(help="Taken off the logits of tokens that were generated before; 0 is off."),
]

FrequencyPenalty = Annotated[
    float | None, typer.Option(help="The same, for each time that they were generated; 0 is off.")
]

RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Divides what occurred in prompt or output; 1 is off.")
]

LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Add this to a token's logit; repeatable."),
]

BadWord = Annotated[list[str] | None, typer.Option(help="Never write this word; repeatable.")]

Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: each token's logprob, and so many likely ones beside it."),
]

PromptLogprobs = Annotated[
    int | None, typer.Option(help="With --json: the same of each token of the prompt.")
]


NumAnswers = Annotated[int, typer.Option("--n", help="So many answers of one prompt.")]

BestOf = Annotated[
    int | None, typer.Option(help="Compute so many answers, and tell the --n likeliest.")
]

BeamSearch = Annotated[
    bool, typer.Option("--beam-search", help="Look for the likeliest answers: --best-of beams.")
]


class Said(TypedDict, total=False):
    """Parameters that a model may have defaults of its own for."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float


def said(**options: float | None) -> Said:
    """Return those of ``Said`` that are not None; the others are left to the model."""
    given: Any = {name: value for name, value in options.items() if value is not None}
    kept: Said = given
    return kept


def parse_bias(pairs: list[str] | None) -> dict[int, float]:
    """Read what was given as ID=BIAS; raises ``ConfigError``."""
    return dict(_pair(text) for text in pairs or ())


def _pair(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise ConfigError(
            f"logit_bias: {text[:40]!r} is no token id with a bias", fix="Write it like 42=-5.0."
        ) from error
