"""From a request to a checked prompt: pure, and the same in producer, scheduler and worker."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.protocol.errors import ConfigError, ContextExceeded, InvalidRequest, UnknownAdapter
from tidemill.protocol.messages import AdapterCard, GenerateRequest, ModelCard
from tidemill.protocol.prefix import (
    ROUTING_HASH_BYTES,
    ExtraKeys,
    hash_blocks,
    hint_hash,
    lora_keys,
    routing_key,
    salt_keys,
)
from tidemill.protocol.sampling import SamplingParams
from tidemill.service.sampling_check import check_sampling

if TYPE_CHECKING:  # an SDK without the tokenizer extra still checks and hashes prompt ids
    from tidemill.service.tokenizer import Tokenizer

#: A rule of thumb for text that nobody has tokenised yet.
BYTES_PER_TOKEN = 4

#: Of one conversation: chat templates are programs, and take their time for each.
MAX_MESSAGES = 8192


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready to be queued; ``cost`` is its length in tokens, before any cache hit.

    ``hint_depth`` tells how many hashes at the start of the routing key stand for a prefix id,
    ``max_output`` bounds the output in tokens, 0 if nothing does.
    """

    ids: tuple[int, ...]
    routing_key: bytes
    cost: int
    hint_depth: int = 0
    max_output: int = 0


def prepare(
    request: GenerateRequest, tokenizer: "Tokenizer | None", card: ModelCard, salt: bytes
) -> PreparedPrompt:
    """Tokenise, check and hash; ``salt`` is the tenant's.  Raises ``InvalidRequest``."""
    return prepare_ids(request, tokenize(request, tokenizer, card), card, salt)


def prepare_ids(
    request: GenerateRequest, ids: tuple[int, ...], card: ModelCard, salt: bytes
) -> PreparedPrompt:
    """Check and hash a request whose prompt is these tokens; raises ``InvalidRequest``."""
    validate(request, len(ids), card)
    extra = _extra_keys(request, card, salt)
    hashes = hash_blocks(ids, card.block_size, extra)
    hint = hint_key(request, card, salt)
    return PreparedPrompt(
        ids=ids,
        routing_key=hint + routing_key(hashes),
        cost=len(ids),
        hint_depth=len(hint) // ROUTING_HASH_BYTES,
        max_output=(request.params.max_tokens or 0) * request.params.num_outputs,
    )


def hint_key(request: GenerateRequest, card: ModelCard, salt: bytes) -> bytes:
    """Return what the routing key begins with: a hash for the prefix id, nothing without one."""
    if request.prefix_id is None:
        return b""
    return hint_hash(request.prefix_id, _extra_keys(request, card, salt))


def adapter_of(request: GenerateRequest, card: ModelCard) -> AdapterCard | None:
    """Return the adapter that the request names, if it does; raises ``UnknownAdapter``."""
    if request.lora is None:
        return None
    found = next((each for each in card.adapters if each.name == request.lora), None)
    if found is None:
        raise UnknownAdapter(request.lora, [each.name for each in card.adapters])
    return found


def tokenize(
    request: GenerateRequest, tokenizer: "Tokenizer | None", card: ModelCard
) -> tuple[int, ...]:
    """The prompt's ids; ``tokenizer`` may be None if the request brings ids.

    Raises ``InvalidRequest`` if the chat template refuses the messages, ``ContextExceeded`` as
    ``check_text``, ``ConfigError`` without a tokenizer that is needed.
    """
    if request.prompt_ids is not None:
        return request.prompt_ids
    if tokenizer is None:
        raise ConfigError(
            "the prompt is text, and there is no tokenizer here",
            fix="Install tidemill[tokenizer], or send prompt_ids.",
        )
    if request.messages is not None:
        check_num_messages("messages", len(request.messages))
        text = tokenizer.apply_chat_template(request.messages)
        check_text("messages", text, tokenizer, card)
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    prompt = request.prompt or ""
    check_text("prompt", prompt, tokenizer, card)
    return tuple(tokenizer.encode(prompt))


def check_text(field: str, text: str, tokenizer: "Tokenizer", card: ModelCard) -> None:
    """Raise ``ContextExceeded`` if a prompt is hopelessly long, which is told by its length alone.

    That is one of more characters than the model's context has room for if every token were the
    vocabulary's longest; of tokenizers that drop text nothing is known by that.
    """
    if len(text) <= card.max_model_len:
        return
    longest = tokenizer.longest_token
    if longest is not None and len(text) > (card.max_model_len - 1) * longest:
        raise ContextExceeded(
            f"{field}: the prompt is too long: {_longest(card)} of {longest} characters at most,"
            f" and it has {len(text)} characters",
            field=field,
            fix=f"Shorten it to {card.max_model_len - 1} tokens at most.",
        )


def check_num_messages(field: str, number: int) -> None:
    """Raise ``InvalidRequest`` for a conversation of more than ``MAX_MESSAGES``."""
    if number > MAX_MESSAGES:
        raise InvalidRequest(
            f"{field}: there are {number}, the limit is {MAX_MESSAGES}",
            field=field,
            fix="Leave out the oldest.",
        )


def validate(request: GenerateRequest, prompt_len: int, card: ModelCard) -> None:
    """Raise ``InvalidRequest``, naming the field and its limit, if the model cannot run this."""
    check_digest(request.tokenizer_digest, card)
    check_vocabulary("prompt_ids", request.prompt_ids or (), card)
    check_vocabulary("params.stop_token_ids", request.params.stop_token_ids, card)
    _check_prompt_length(_prompt_field(request), prompt_len, card)
    _check_output_length(request.params, prompt_len, card)
    check_sampling(request.params, prompt_len, card)


def most_tokens(request: GenerateRequest, card: ModelCard) -> int:
    """What a job counts against its tenant's quotas: its prompt and its longest output, in tokens.

    The length of a prompt that is still text is estimated from its bytes.
    """
    room = card.max_model_len - 1
    if request.prompt_ids is not None:
        prompt_len = len(request.prompt_ids)
    else:
        texts = [request.prompt or "", *(turn.content for turn in request.messages or ())]
        num_bytes = sum(len(text.encode()) for text in texts)
        prompt_len = min(room, -(-num_bytes // BYTES_PER_TOKEN))
    longest = min(
        card.max_model_len, prompt_len + (request.params.max_tokens or card.max_model_len)
    )
    # Its outputs share the prompt.
    return longest + (request.params.num_outputs - 1) * max(0, longest - prompt_len)


def extra_keys(
    salt: bytes, revision: str, cache_salt: str | None, lora: tuple[str, str] | None = None
) -> ExtraKeys:
    """What separates the prefixes of tenants, models and adapters: the extra keys of block 0.

    ``salt`` is the tenant's 16 random bytes, ``cache_salt`` the caller's own, which only narrows;
    ``lora`` is name and digest of an adapter.
    """
    adapter = () if lora is None else lora_keys(*lora)
    return (*adapter, *salt_keys(salt + revision.encode(), cache_salt))


def _extra_keys(request: GenerateRequest, card: ModelCard, salt: bytes) -> ExtraKeys:
    adapter = adapter_of(request, card)
    lora = None if adapter is None else (adapter.name, adapter.digest)
    return extra_keys(salt, card.revision, request.cache_salt, lora)


def _prompt_field(request: GenerateRequest) -> str:
    if request.prompt is not None:
        return "prompt"
    return "prompt_ids" if request.prompt_ids is not None else "messages"


def check_digest(digest: str | None, card: ModelCard) -> None:
    """Raise ``InvalidRequest`` if another tokenizer than the model's made the token ids."""
    if digest is not None and digest != card.tokenizer_digest:
        raise InvalidRequest(
            f"tokenizer_digest: {digest[:12]}... is not the tokenizer of model {card.name!r}"
            f" ({card.tokenizer_digest[:12]}...)",
            field="tokenizer_digest",
            fix="Tokenise again with the served model's tokenizer, or send text.",
        )


def check_vocabulary(field: str, ids: tuple[int, ...], card: ModelCard) -> None:
    """Raise ``InvalidRequest`` if the model does not know one of the token ids."""
    if ids and max(ids) >= card.vocab_size:
        raise InvalidRequest(
            f"{field}: token id {max(ids)} is outside the vocabulary of {card.vocab_size}",
            field=field,
            fix="Use the tokenizer of the served model.",
        )


def _check_prompt_length(field: str, prompt_len: int, card: ModelCard) -> None:
    if prompt_len == 0:
        raise InvalidRequest(
            f"{field}: it has no tokens", field=field, fix="Send at least one token."
        )
    if prompt_len + 1 > card.max_model_len:
        raise ContextExceeded(
            f"{field}: the prompt is too long: {_longest(card)}, and {prompt_len} leave no room for"
            " an answer",
            field=field,
            fix=f"Shorten it to {card.max_model_len - 1} tokens at most.",
        )


def _check_output_length(params: SamplingParams, prompt_len: int, card: ModelCard) -> None:
    room = card.max_model_len - prompt_len
    for field, wanted in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        if wanted is not None and wanted > room:
            raise ContextExceeded(
                f"params.{field}: {_longest(card)}, but {wanted} after a prompt of {prompt_len} are"
                f" {prompt_len + wanted}",
                field=f"params.{field}",
                fix=f"Ask for {room} at most, or shorten the prompt.",
            )


def _longest(card: ModelCard) -> str:
    # Clients look for these words to shorten a conversation by themselves.
    return f"this model's maximum context length is {card.max_model_len} tokens"
