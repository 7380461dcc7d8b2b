"""The special tokens of a Whisper model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import DamagedModel, InvalidRequest
from tidemill.service.tokenizer import Tokenizer

#: Seconds between two timestamp tokens.
TIME_PRECISION = 0.02
_FIX = "Fetch the model again; generation_config.json and tokenizer.json must be its own."


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of tokens that are not text; those below ``end`` are text.

    ``languages`` maps codes to ids; it is empty for a model that knows English only, which has no
    tokens for languages and tasks.  ``alignment_heads`` are (layer, head) pairs whose attention
    follows the audio.
    """

    end: int
    start: int
    previous: int
    no_speech: int | None
    no_timestamps: int
    first_timestamp: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    alignment_heads: tuple[tuple[int, int], ...]
    max_initial_timestamp: int

    @property
    def is_multilingual(self) -> bool:
        """Whether a window begins with its language and task."""
        return bool(self.languages)

    def language_of(self, token_id: int) -> str:
        """Return the code of a language token."""
        return next(code for code, known in self.languages.items() if known == token_id)

    def check_language(self, language: str | None, task: str) -> None:
        """Raise ``InvalidRequest`` for what the model does not speak or do."""
        if self.is_multilingual:
            if language is not None and language not in self.languages:
                raise InvalidRequest(
                    f"language: the model does not know {language!r}",
                    field="language",
                    fix="Leave it out, or give a code such as en.",
                )
        elif language not in (None, "en"):
            raise InvalidRequest(
                f"language: the model knows English only, not {language!r}", field="language"
            )
        elif task == "translate":
            raise InvalidRequest("task: the model knows English only", field="task")

    def opening(self, language: str, task: str, *, timestamps: bool) -> tuple[int, ...]:
        """Return the tokens that a window begins with."""
        named = (self.languages[language], self.tasks[task]) if self.is_multilingual else ()
        return (self.start, *named, *(() if timestamps else (self.no_timestamps,)))

    def text_ids(self, ids: tuple[int, ...]) -> list[int]:
        """Return the tokens that are text."""
        return [token_id for token_id in ids if token_id < self.end]


def read_vocabulary(model_dir: Path, tokenizer: Tokenizer) -> Vocabulary:
    """Read generation_config.json and the tokenizer; raises ``DamagedModel``."""
    path = model_dir / "generation_config.json"
    try:
        config = json.loads(path.read_bytes())
        return _parse(config, tokenizer)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedModel(f"{path} cannot be used: {error!r}", fix=_FIX) from error


def _parse(config: Mapping[str, Any], tokenizer: Tokenizer) -> Vocabulary:
    def token(*names: str) -> int | None:
        found = (tokenizer.raw.token_to_id(name) for name in names)
        return next((token_id for token_id in found if token_id is not None), None)

    def needed(name: str) -> int:
        token_id = token(name)
        if token_id is None:
            raise LookupError(f"the tokenizer has no {name}")
        return token_id

    no_timestamps = int(config.get("no_timestamps_token_id") or needed("<|notimestamps|>"))
    languages = config.get("lang_to_id") or {}
    return Vocabulary(
        end=needed("<|endoftext|>"),
        start=needed("<|startoftranscript|>"),
        previous=needed("<|startofprev|>"),
        no_speech=token("<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=no_timestamps,
        first_timestamp=no_timestamps + 1,
        languages={name.strip("<|>"): int(token_id) for name, token_id in languages.items()},
        tasks={name: int(token_id) for name, token_id in (config.get("task_to_id") or {}).items()},
        suppressed=tuple(config.get("suppress_tokens") or ()),
        suppressed_first=tuple(config.get("begin_suppress_tokens") or ()),
        alignment_heads=tuple((int(a), int(b)) for a, b in config.get("alignment_heads") or ()),
        max_initial_timestamp=int(config.get("max_initial_timestamp_index") or 50),
    )
