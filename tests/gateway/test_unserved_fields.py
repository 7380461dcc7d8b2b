"""What vLLM knows and is not served here is refused by name, and never just left out."""

from typing import Any

import pytest

from tidemill.gateway.chatting import _template_options
from tidemill.gateway.openai_models.audio import TranscriptionRequest
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.openai_models.completions import CompletionRequest
from tidemill.gateway.openai_models.sampling import UNSERVED
from tidemill.gateway.options import job_options
from tidemill.openai.response_format import structured_fields
from tidemill.protocol.errors import InvalidRequest
from tidemill.service.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_what_is_known_and_has_no_effect_is_refused_by_name(name: str) -> None:
    for model, prompt in ((ChatRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "x"})):
        with pytest.raises(InvalidRequest, match=f"^{name}: it is not supported") as refused:
            model.model_validate({**prompt, name: {"a": 1}})
        assert refused.value.field == name
        for nothing in (None, False, {}, ""):
            model.model_validate({**prompt, name: nothing})


@pytest.mark.parametrize("name", ["hotwords", "top_p", "seed"])
def test_speech_refuses_what_would_decode_it_differently(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: it is not supported"):
        TranscriptionRequest.model_validate({name: "0.9"})


def test_speech_takes_what_leaves_decoding_as_it_is() -> None:
    neutral = {"top_p": "1", "repetition_penalty": "1.0", "frequency_penalty": "0.0", "top_k": "-1"}
    TranscriptionRequest.model_validate({**neutral, "min_p": "0", "presence_penalty": "0"})


def test_a_session_names_what_its_prompts_begin_with_unless_the_request_does() -> None:
    body = {"messages": HELLO, "session_id": "s"}
    assert job_options(ChatRequest.model_validate(body)).get("prefix_id") == "s"
    named = ChatRequest.model_validate({**body, "prompt_cache_key": "k"})
    assert job_options(named).get("prefix_id") == "k"


def test_tags_within_a_free_answer_are_refused_with_what_to_use() -> None:
    form = {"type": "structural_tag", "structures": [], "triggers": ["<a>"]}
    with pytest.raises(InvalidRequest, match="structural_tag is not supported") as refused:
        structured_fields({"response_format": form})
    assert refused.value.field == "response_format.type"
    assert "json_schema" in refused.value.fix


def test_documents_are_handed_to_the_chat_template() -> None:
    template = ChatTemplate("{% for each in documents or [] %}[{{ each.text }}]{% endfor %}", {})
    documents: list[dict[str, Any]] = [{"title": "a", "text": "b"}, {"text": "c"}]
    body = ChatRequest.model_validate({"messages": HELLO, "documents": documents})
    assert template.render(HELLO, options=_template_options(body)) == "[b][c]"
    assert template.render(HELLO) == ""
