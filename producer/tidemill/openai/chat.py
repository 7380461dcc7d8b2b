"""A chat request as a job: its prompt, its constraint, and the parser of what comes back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from tidemill.openai.conversation import template_messages
from tidemill.openai.deltas import Delta
from tidemill.openai.forced_calls import ForcedCallParser, forced_calls
from tidemill.openai.formats import (
    ReasoningFormat,
    ToolFormat,
    choose_reasoning_format,
    choose_tool_format,
    reasoning_format,
    tool_format,
)
from tidemill.openai.output_parser import OutputParser
from tidemill.openai.tools import CallMode, ToolChoice, parse_tool_choice, parse_tools
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import invalid_request
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.tokenizer import Tokenizer


class Parser(Protocol):
    """Turns the text of one output into pieces of an assistant's message."""

    def feed(self, text: str) -> Delta:
        """Take the next piece; returns what it made certain."""

    def finish(self) -> Delta:
        """End the output; returns what had been held back."""


class PlainParser:
    """Of outputs that are nothing but content."""

    def feed(self, text: str) -> Delta:
        """Return the piece."""
        return Delta(text)

    def finish(self) -> Delta:
        """Return nothing: nothing is held back."""
        return Delta()


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How a model writes tool calls and reasoning; None where it has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(
        cls, chat_template: str, *, tools: str | None = None, reasoning: str | None = None
    ) -> "ChatFormats":
        """Return the formats of these names or, where not named, those of the chat template.

        Raises ``InvalidRequest`` for an unknown name.
        """
        tools = tools or choose_tool_format(chat_template)
        reasoning = reasoning or choose_reasoning_format(chat_template)
        return cls(
            None if tools is None else tool_format(tools),
            None if reasoning is None else reasoning_format(reasoning),
        )


@dataclass(frozen=True, slots=True)
class ChatJob:
    """What is submitted for a chat request, and how its output is read.

    ``prompt`` is to be encoded without special tokens, it has its own: ``prompt_ids`` are that.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    structured: StructuredOutput | None
    choice: ToolChoice
    formats: ChatFormats

    def parser(self) -> Parser:
        """Return a new parser for one output."""
        if self.choice.mode is CallMode.FORCED:
            return ForcedCallParser()
        reasoning = None if self.structured else self.formats.reasoning
        if reasoning is None and not self.choice.tools:
            return PlainParser()
        return OutputParser(
            {tool.name: tool.parameters for tool in self.choice.tools},
            tool_format=self.formats.tools,
            reasoning=reasoning,
            is_reasoning=reasoning is not None and reasoning.is_open_after(self.prompt),
        )


def chat_job(
    tokenizer: Tokenizer,
    messages: object,
    *,
    tools: object = None,
    tool_choice: object = None,
    parallel_tool_calls: bool = True,
    structured: StructuredOutput | None = None,
    formats: ChatFormats | None = None,
    add_generation_prompt: bool = True,
    template_options: Mapping[str, Any] | None = None,
    check_prompt: Callable[[str], None] = lambda prompt: None,
) -> ChatJob:
    """Return the job of a chat request; arguments are as in OpenAI's API.

    ``check_prompt`` is told the prompt before it is tokenised, and raises if that is in vain.
    A forced call is a constraint of its own; what ``structured`` says of texts does not matter
    then, because there is none.  Raises ``InvalidRequest`` naming the field that is wrong.
    """
    known = parse_tools(tools)
    choice = parse_tool_choice(tool_choice, known)
    # A tool that cannot be called is not worth its tokens, but beside the forced ones the others
    # tell what those are for.
    seen = known if choice.mode is CallMode.FORCED else choice.tools
    offered = [tool.as_function() for tool in seen]
    prompt = tokenizer.apply_chat_template(
        template_messages(messages, tokenizer.chat_template),
        add_generation_prompt,
        tools=offered,
        options=template_options,
    )
    check_prompt(_valid(prompt))
    if choice.mode is CallMode.FORCED:
        structured = _force(choice, is_parallel=parallel_tool_calls)
    return ChatJob(
        prompt=prompt,
        prompt_ids=tuple(tokenizer.encode(prompt, add_special_tokens=False)),
        structured=structured,
        choice=choice,
        formats=formats or ChatFormats.of(tokenizer.chat_template),
    )


def _valid(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "messages: a text has half of a surrogate pair", field="messages"
        ) from error
    return prompt


def _force(choice: ToolChoice, *, is_parallel: bool) -> StructuredOutput:
    try:
        return forced_calls(choice.tools, is_parallel=is_parallel and not choice.is_named)
    except ValidationError as error:
        told = invalid_request(error)
        raise InvalidRequest(f"tools: {told.message}", field="tools") from error
