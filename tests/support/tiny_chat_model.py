"""A tiny random model with a tokenizer and a chat template, which can be served as a whole."""

import json
from pathlib import Path

from support.tiny_models import save_tiny_model
from support.tiny_tokenizers import SPECIAL, byte_level_tokenizer

#: Roles and contents, tool calls as Hermes writes them, thoughts as Qwen 3 does.
CHAT_TEMPLATE = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{%- for message in messages %}{{ message.role }}: {{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor %}\n{% endfor %}"
    "{%- if add_generation_prompt %}assistant: {% endif %}"
)


def save_tiny_chat_model(directory: Path, name: str = "llama-tied") -> Path:
    """Write the model of that name in ``CONFIGS`` with all that a server needs."""
    save_tiny_model(name, directory)
    tokenizer = byte_level_tokenizer()
    (directory / "tokenizer.json").write_text(tokenizer.raw.to_str())
    config = {"eos_token": SPECIAL, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    # Its configuration names tokens of a larger vocabulary.
    [eos] = tokenizer.eos_token_ids
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": eos}))
    return directory
