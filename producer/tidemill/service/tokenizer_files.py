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


def chat_template_path(directory: Path) -> Path:
    """Return the file of a model directory that the chat template is read from."""
    own = directory / "chat_template.jinja"
    return own if own.exists() else directory / "tokenizer_config.json"


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
    path = chat_template_path(directory)
    if path.suffix == ".jinja":
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        default = (entry.get("template") for entry in named if entry.get("name") == "default")
        template = next(default, None)
    if not isinstance(template, str | None):
        raise _damaged(path, f"chat_template must be text, not {template!r}")
    return template


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
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise _damaged(
                directory / name,
                f"eos_token_id must be a token id or a list of them, not {value!r}",
            )
        if ids:
            return tuple(ids)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
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
