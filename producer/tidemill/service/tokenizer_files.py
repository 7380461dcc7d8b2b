"""What a Hugging Face model directory says about its tokenizer, as plain data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import DamagedModel, ModelNotFound

_SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Content of ``tokenizer.json`` and what of its neighbours bears on text.

    ``eos_token_ids`` are the generation config's, which end a generation; None where the
    directory names none.  ``special_tokens`` maps ``bos_token`` and so on to their text.
    """

    tokenizer_json: str
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] | None = None


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read a model directory; raises ``ModelNotFound`` or ``DamagedModel``."""
    config = _read_json(directory / "tokenizer_config.json")
    legacy_names = _read_json(directory / "special_tokens_map.json")
    return TokenizerFiles(
        tokenizer_json=_read_tokenizer(directory),
        chat_template=_chat_template(directory, config),
        special_tokens=_special_tokens(legacy_names | config),
        eos_token_ids=_eos_token_ids(directory),
    )


def _read_tokenizer(directory: Path) -> str:
    if not directory.is_dir():
        raise ModelNotFound(
            f"there is no model directory {directory}", fix="Name a Hugging Face model directory."
        )
    text = _read_text(directory / "tokenizer.json")
    if text is None:
        raise ModelNotFound(
            f"{directory} has no tokenizer.json",
            fix="Save the tokenizer there with transformers' AutoTokenizer.save_pretrained.",
        )
    return text


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    text = _read_text(directory / "chat_template.jinja")
    if text is not None:
        return text
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    values = {name: config.get(name) for name in _SPECIAL_NAMES}
    values |= extra if isinstance(extra, dict) else {}
    texts = {name: _token_text(value) for name, value in values.items()}
    return {name: text for name, text in sorted(texts.items()) if text is not None}


def _token_text(value: Any) -> str | None:
    # A token is written as its text or as an object with its matching rules.
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _eos_token_ids(directory: Path) -> tuple[int, ...] | None:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token_id) for token_id in value)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object")
    return value


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, reason: object) -> DamagedModel:
    return DamagedModel(f"{path} cannot be read: {reason}", fix="Fetch the model again.")
