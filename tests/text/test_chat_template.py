"""Chat templates render what transformers renders, and cannot leave their sandbox."""

from pathlib import Path
from typing import Any

import pytest

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import ChatMessage
from tidemill.service.chat_template import ChatTemplate

OWN = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
COLLECTED = Path(__file__).parents[3] / "shared/data/chat_templates"
FOREIGN = sorted(COLLECTED.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

CHATS = [
    [("user", "Hello <b>there</b> & 'you'")],
    [("system", " Be brief. "), ("user", "Ça va? 🙂"), ("assistant", "Oui."), ("user", "東京\t\n")],
    [("user", "{{ 1 + 1 }} {% raw %}"), ("assistant", ""), ("user", "  spaces  ")],
    [("user", "<|im_end|></s>"), ("user", "twice in a row")],
    [("system", "only a system turn")],
    [("tool", "an unexpected role")],
]


def expected(template: str, chat: list[dict[str, str]], add_generation_prompt: bool) -> str | None:
    """What transformers renders; None if the template refuses the chat."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            [chat],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **SPECIAL,
        )
    except (jinja2.TemplateError, TypeError, IndexError):
        return None
    return str(rendered[0][0])


def ours(template: str, chat: list[dict[str, str]], add_generation_prompt: bool) -> str | None:
    messages = [ChatMessage(**turn) for turn in chat]
    try:
        return ChatTemplate(template, SPECIAL).render(
            messages, add_generation_prompt=add_generation_prompt
        )
    except InvalidRequest as error:
        assert error.field == "messages"
        return None


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("path", OWN + FOREIGN, ids=lambda path: path.stem)
def test_a_template_renders_what_transformers_renders(
    path: Path, add_generation_prompt: bool
) -> None:
    template = path.read_text()
    rendered = 0
    for turns in CHATS:
        chat = [{"role": role, "content": content} for role, content in turns]
        want = expected(template, chat, add_generation_prompt)
        assert ours(template, chat, add_generation_prompt) == want
        rendered += want is not None
    assert rendered > 0, "every chat was refused: the template proves nothing"


@pytest.mark.skipif(not FOREIGN, reason="the collection of published templates is not here")
def test_the_collection_of_published_templates_is_complete() -> None:
    assert len(FOREIGN) >= 18


def test_a_refusal_tells_the_reason_the_template_gives() -> None:
    template = ChatTemplate((OWN[0].parent / "strict.jinja").read_text(), SPECIAL)
    with pytest.raises(InvalidRequest, match="not tool") as caught:
        template.render([ChatMessage(role="tool", content="x")])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ strftime_now.__func__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(a=1).__class__.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_outside(source: str) -> None:
    try:
        rendered = ChatTemplate(source, {}).render([ChatMessage(role="user", content="x")])
    except InvalidRequest:
        return
    assert rendered == "", "an unsafe attribute renders as undefined at most"


@pytest.mark.parametrize("source", ["{% for x in messages %}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_a_broken_template_is_a_refused_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}).render([ChatMessage(role="user", content="x")])


def test_a_runaway_template_is_stopped() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="more than"):
        ChatTemplate(loop, {}).render([ChatMessage(role="user", content="x")])
