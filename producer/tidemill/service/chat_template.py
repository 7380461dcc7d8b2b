"""A model's chat template: sandboxed Jinja that renders what transformers would render."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tidemill.protocol.errors import DamagedModel, InvalidRequest
from tidemill.protocol.messages import ChatMessage

#: A message on the wire has 1 MiB at most; a template that writes more than this runs away.
MAX_RENDERED_CHARS = 1 << 24

#: What a template, which is the model's code and not ours, may raise on an unexpected message.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,  # from Python, which runs what Jinja compiles
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One template and the special tokens (``bos_token``, ...) it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def check(self, origin: Path) -> None:
        """Raise ``DamagedModel`` naming ``origin`` if the template cannot be compiled."""
        try:
            self._template  # noqa: B018 - compiled on first use
        except _TEMPLATE_ERRORS as error:
            raise DamagedModel(
                f"{origin}: the chat template cannot be compiled: {error}",
                fix="Fetch the file again, or delete the template to serve plain prompts only.",
            ) from error

    def render(
        self,
        messages: Sequence[ChatMessage | Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``; raises ``InvalidRequest`` if the template refuses them.

        ``add_generation_prompt`` opens the assistant's next turn.  ``tools`` are OpenAI's function
        tools, ``options`` further variables that this template knows; a message may be a mapping
        with all that the template looks for.
        """
        variables = {
            "documents": None,
            **(options or {}),
            **self._special_tokens,
            "messages": [_plain(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _join(self._template.generate(**variables))
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}",
                field="messages",
                fix="Send turns the model was trained on, or send prompt instead.",
            ) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.source)


def _plain(message: ChatMessage | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": message.content}
    return dict(message)


class _GenerationBlocks(jinja2.ext.Extension):
    """Lets ``{% generation %}`` blocks through; they only mark training data."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict`` without its attributes, which lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, dict=_Dict())
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models have never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(reason: str) -> str:
    raise jinja2.TemplateError(reason)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _join(parts: Iterable[str]) -> str:
    pieces, length = [], 0
    for part in parts:
        pieces.append(part)
        length += len(part)
        if length > MAX_RENDERED_CHARS:
            raise jinja2.TemplateError(f"it writes more than {MAX_RENDERED_CHARS} characters")
    return "".join(pieces)
