"""A tiny random model with a tokenizer and a chat template, which can be served as a whole."""

import json
from pathlib import Path

from support.tiny_models import save_tiny_model
from support.tiny_tokenizers import SPECIAL, byte_level_tokenizer

#: Roles, contents, and tool calls as Hermes writes them.
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{{ '\\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MAX_MODEL_LEN = 2048


def save_tiny_chat_model(directory: Path, name: str = "llama-tied") -> Path:
    """Write the model of that name in ``CONFIGS`` with all that a server needs."""
    save_tiny_model(name, directory)
    tokenizer = byte_level_tokenizer()
    (directory / "tokenizer.json").write_text(tokenizer.raw.to_str())
    config = {"eos_token": SPECIAL, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    # Tools make long prompts where each byte is a token; rotary positions go as far as one likes.
    model_config = json.loads((directory / "config.json").read_text())
    model_config["max_position_embeddings"] = MAX_MODEL_LEN
    (directory / "config.json").write_text(json.dumps(model_config))
    # Its configuration names tokens of a larger vocabulary.
    [eos] = tokenizer.eos_token_ids
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": eos}))
    return directory
