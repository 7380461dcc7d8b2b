"""``/tokenize`` and its neighbours, as vLLM has them."""

from typing import Any

from tidemill.gateway.openai_models.base import ApiRequest, ApiResponse
from tidemill.gateway.openai_models.chat import MessagesField


class TokenizeRequest(ApiRequest):
    """A text or a conversation; the latter has special tokens of its own."""

    model: str | None = None
    prompt: str | None = None
    messages: MessagesField = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokens(ApiResponse):
    """Its token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(ApiRequest):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class Detokenized(ApiResponse):
    """Their text, special tokens included."""

    prompt: str


class TokenizerInfo(ApiResponse):
    """What a client needs to build prompts by itself."""

    model: str
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    eos_token: str | None = None
    bos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None
