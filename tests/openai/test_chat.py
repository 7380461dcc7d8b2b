"""A chat request becomes a prompt, a constraint and a parser."""

from pathlib import Path
from typing import Any

import pytest

from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.openai.chat import ChatFormats, ChatJob, chat_job
from tidemill.openai.conversation import template_messages
from tidemill.openai.deltas import Delta
from tidemill.openai.tools import parse_tools
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.chat_template import ChatTemplate
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_files import TokenizerFiles

#: Written for these tests, after what hermes-like templates do.
TEMPLATE = """\
{%- if tools %}TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}{% for call in m.tool_calls %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% if thinking %}<think>
{% endif %}{% endif %}"""

COLLECTED = Path(__file__).parents[3] / "shared/data/chat_templates"
PUBLISHED = sorted(COLLECTED.glob("tool_*.jinja")) + sorted(COLLECTED.glob("cz_qwen*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <now>.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name"}},
                "required": ["city"],
            },
        },
    }
]

CALL = {
    "id": "call_0aB1c2D3e",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
}

MESSAGES: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "How is it in"}, {"type": "text", "text": "Zürich?"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0aB1c2D3e", "name": "get_weather", "content": "20 °C"},
    {"role": "user", "content": "And tomorrow?"},
]


@pytest.fixture
def tokenizer() -> Tokenizer:
    raw = byte_level_tokenizer().raw.to_str()
    return Tokenizer(TokenizerFiles(raw, chat_template=TEMPLATE, eos_token_ids=(0,)))


def transformers_renders(template: str, messages: list[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [messages], tools=TOOLS, chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    return str(rendered[0][0])


def plain_conversation() -> list[dict[str, Any]]:
    """The messages with the tool call as transformers' users write it."""
    call = {"type": "function", "id": CALL["id"], "function": {"name": "get_weather"}}
    call["function"]["arguments"] = {"city": "Zürich"}  # type: ignore[index]
    return [
        {"role": "user", "content": "How is it in\nZürich?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        MESSAGES[2],
        MESSAGES[3],
    ]


def test_a_conversation_with_tools_is_rendered_as_transformers_renders_it() -> None:
    want = transformers_renders(TEMPLATE, plain_conversation())
    tools = [tool.as_function() for tool in parse_tools(TOOLS)]
    got = ChatTemplate(TEMPLATE, SPECIAL).render(template_messages(MESSAGES), tools=tools)
    assert got == want
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}' in got


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates_render_conversations_with_tools(path: Path) -> None:
    import jinja2

    template = path.read_text()
    tools = [tool.as_function() for tool in parse_tools(TOOLS)]
    try:
        want: str | None = transformers_renders(template, plain_conversation())
    except (jinja2.TemplateError, TypeError):
        want = None
    try:
        got: str | None = ChatTemplate(template, SPECIAL).render(
            template_messages(MESSAGES), tools=tools
        )
    except InvalidRequest:
        got = None
    assert got == want


def job(tokenizer: Tokenizer, **given: Any) -> ChatJob:
    return chat_job(tokenizer, MESSAGES, **{"tools": TOOLS, **given})


def parsed(made: ChatJob, text: str) -> Delta:
    parser = made.parser()
    return parser.feed(text) + parser.finish()


CALL_TEXT = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_tools_may_be_called_unless_the_request_says_otherwise(tokenizer: Tokenizer) -> None:
    made = job(tokenizer)
    assert made.structured is None
    assert "TOOLS" in made.prompt
    assert tokenizer.decode(made.prompt_ids, skip_special_tokens=False) == made.prompt
    assert [call.name for call in parsed(made, CALL_TEXT).tool_calls] == ["get_weather"]


def test_an_empty_list_of_tools_is_none(tokenizer: Tokenizer) -> None:
    assert chat_job(tokenizer, MESSAGES, tools=[]) == chat_job(tokenizer, MESSAGES)


def test_without_calls_the_model_does_not_see_the_tools(tokenizer: Tokenizer) -> None:
    made = job(tokenizer, tool_choice="none")
    assert "TOOLS" not in made.prompt
    assert parsed(made, CALL_TEXT) == Delta(content=CALL_TEXT)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_is_a_constraint(tokenizer: Tokenizer, choice: object) -> None:
    made = job(tokenizer, tool_choice=choice)
    assert made.structured is not None and made.structured.json_schema is not None
    assert '"maxItems":1,' in made.structured.json_schema.replace(
        "16" if choice == "required" else "-", "1"
    )
    told = parsed(made, '[{"name": "get_weather", "arguments": {"city": "Rome"}}]')
    assert [call.arguments for call in told.tool_calls] == ['{"city": "Rome"}']


def test_of_several_tools_only_those_that_are_allowed_are_called(tokenizer: Tokenizer) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "get_time"}}]

    def made(mode: str) -> ChatJob:
        allowed = {"mode": mode, "tools": TOOLS}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        return job(tokenizer, tools=tools, tool_choice=choice)

    assert made("auto") == job(tokenizer)
    required = made("required")
    assert required.structured == job(tokenizer, tool_choice="required").structured
    assert "get_time" in required.prompt


def test_a_form_of_texts_does_not_matter_to_a_call_that_is_forced(tokenizer: Tokenizer) -> None:
    made = job(tokenizer, tool_choice="required", structured=StructuredOutput(regex="a"))
    assert made.structured == job(tokenizer, tool_choice="required").structured


def test_reasoning_that_the_prompt_opens_is_told_apart(tokenizer: Tokenizer) -> None:
    made = job(tokenizer, template_options={"thinking": True})
    assert parsed(made, "hm</think>Sunny.") == Delta(content="Sunny.", reasoning="hm")
    assert parsed(job(tokenizer), "Sunny.") == Delta(content="Sunny.")


def test_a_structured_answer_is_content_whatever_it_looks_like(tokenizer: Tokenizer) -> None:
    made = chat_job(
        tokenizer,
        MESSAGES,
        structured=StructuredOutput(json_object=True),
        template_options={"thinking": True},
    )
    assert parsed(made, '{"a": 1}') == Delta(content='{"a": 1}')


def deep_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": "get_weather"}, "tools: it is not a list of tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0: it is not a function tool"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: it is missing"),
        ({"tools": TOOLS * 2}, "tools: 'get_weather' occurs twice"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name: it is not a name"),
        (
            {"tools": [{"function": {"name": "a", "parameters": []}}]},
            "tools.0.function.parameters: a schema is an object",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": deep_schema(400)}}]},
            "tools.0.function.parameters: it nests deeper than 64 levels",
        ),
        ({"tool_choice": "auto"}, "tool_choice: there are no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice: it is none of"),
        (
            {"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}},
            "tool_choice: 'other' is none of the tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            "tool_choice: the mode of allowed tools is neither auto nor required",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "other"}}]},
                },
            },
            "tool_choice: 'other' is none of the tools",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": []},
                },
            },
            "tool_choice: there are no allowed tools",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_refused_by_field(
    tokenizer: Tokenizer, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_job(tokenizer, MESSAGES, **given)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: it is not a list"),
        (["hi"], "messages.0: it is not an object"),
        ([{"content": "x"}], "messages.0.role: it is missing"),
        ([{"role": "user", "content": 3}], "messages.0.content: it is neither text nor"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages.0.content.0: parts of type 'image_url' are not supported",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments: it is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            "messages.0.tool_calls.0.function.arguments: it is not an object",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 7}], "messages.0.tool_call_id: it is"),
        ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id: it is missing"),
        ([{"role": "zzz", "content": "x"}], "messages.0.role: 'zzz' is none that the model knows"),
    ],
)
def test_what_is_wrong_with_a_message_is_refused_by_field(
    messages: list[Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_messages(messages)
    assert message in caught.value.message


def test_a_role_that_the_models_template_names_is_taken() -> None:
    messages = [{"role": "ipython", "content": "x"}]
    for source in ("{% if m.role == 'ipython' %}", '{% if m.role in ["tool", "ipython"] %}'):
        assert template_messages(messages, source)[0]["role"] == "ipython"
    with pytest.raises(InvalidRequest, match=r"messages\.0\.role"):
        template_messages(messages, "{{ m.role }} ipython")


def test_roles_and_reasoning_reach_the_template_by_the_names_it_knows() -> None:
    told = template_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "assistant",
                "content": "4",
                "reasoning": "2+2",
                "refusal": None,
                "audio": None,
            },
        ]
    )
    assert told[0]["role"] == "system"
    assert told[1] == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}


def test_formats_can_be_named() -> None:
    formats = ChatFormats.of("<tool_call>", tools="mistral", reasoning="deepseek_r1")
    assert formats.tools is not None and "[TOOL_CALLS]" in formats.tools.readers
    assert formats.reasoning is not None and formats.reasoning.is_implied
