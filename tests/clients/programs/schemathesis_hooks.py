"""What schemathesis cannot know of the gateway: names that exist, and what agrees with what."""

import io
import json
import os
import wave
from random import Random
from typing import Any

import schemathesis


def speech() -> bytes:
    """A quarter of a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(8_000))
    return file.getvalue()


MODELS = dict(pair.split("=") for pair in os.environ["TIDEMILL_FUZZED_MODELS"].split(","))
#: The task of the model that a path needs, by the path's end.
TASKS = {
    "/embeddings": "embed",
    "/score": "score",
    "/rerank": "score",
    "/transcriptions": "transcribe",
    "/translations": "transcribe",
}
MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
#: Values that are accepted and cheap.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(MOST_TOKENS, (1, 4)),
    **dict.fromkeys(("temperature", "presence_penalty", "frequency_penalty"), (0, 2)),
    **dict.fromkeys(("top_p", "min_p", "repetition_penalty"), (0.1, 1)),
    **dict.fromkeys(("logprobs", "min_tokens"), (0, 1)),
    **dict.fromkeys(("n", "top_n", "top_k"), (1, 2)),
    **dict.fromkeys(("priority", "max_retries"), (0, 9)),
    "seed": (0, 2**31),
}
#: Of all requests: jobs that need not wait, and may take the time that they take.
HASTE: dict[str, tuple[float, float]] = {
    **dict.fromkeys(MOST_TOKENS, (-1, 4)),
    **dict.fromkeys(("deadline", "max_queue", "stall_timeout"), (60, 600)),
    "delay": (-1, 0),
}
#: Fields that agree with few others, or are refused whatever their value.
HARD = {
    *("suffix", "functions", "function_call", "chat_template", "conversation"),
    *("context_management", "best_of", "use_beam_search", "length_penalty"),
    *("repetition_detection", "logit_bias", "allowed_token_ids", "stop", "stop_token_ids"),
    *("bad_words", "logprob_token_ids", "response_format", "structured_outputs", "text"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools"),
    *("tool_choice", "metadata", "reasoning", "stream_options", "truncation_side"),
    *("previous_response_id", "background", "store", "callback_url", "batch"),
    *("chat_template_kwargs", "continue_final_message", "add_generation_prompt", "system"),
    *("thinking", "echo"),
    *("top_logprobs", "prompt_logprobs", "truncate_prompt_tokens", "dimensions", "queries"),
    *("max_tokens_per_doc", "documents", "timestamp_granularities[]", "language"),
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
#: What a request is about, by its path's end; the longest that fits counts.
GOOD: dict[str, dict[str, Any]] = {
    "/completions": {"prompt": "hi"},
    "/chat/completions": CHAT,
    "/messages": CHAT,
    "/count_tokens": CHAT,
    "/responses": {"input": "hi"},
    "/input_tokens": {"input": "hi"},
    "/jobs": {"kind": "generate", "prompt": "hi"},
    "/tokenize": {"prompt": "hi", "messages": None},
    "/detokenize": {"tokens": [1, 2]},
    "/embeddings": {"input": ["hi", "there"]},
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
    "/transcriptions": {"file": speech()},
    "/translations": {"file": speech()},
}


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    """Let requests come to work, two of three with fields that are accepted; none for long."""
    if isinstance(case.body, dict):
        chance = Random(json.dumps([case.path, case.body], sort_keys=True, default=repr))
        _hurry(case.body)
        if chance.random() < 0.67:
            _tame(case, case.body, chance)
    if isinstance(case.query, dict) and "wait" in case.query:
        case.query["wait"] = _within(case.query["wait"], 0, 1)


def _hurry(body: dict[str, Any]) -> None:
    for name in body.keys() & HASTE.keys():
        body[name] = _within(body[name], *HASTE[name])


def _about(path: str) -> dict[str, Any]:
    ends = [end for end in GOOD if path.endswith(end)]
    return GOOD[max(ends, key=len)] if ends else {}


def _tame(case: schemathesis.Case, body: dict[str, Any], chance: Random) -> None:
    for name in [name for name in body if name in HARD and chance.random() < 0.9]:
        del body[name]
    for name in body.keys() & RANGES.keys():
        body[name] = _within(body[name], *RANGES[name])
    if chance.random() < 0.9:
        body.update(_about(case.path))
    task = next((task for end, task in TASKS.items() if case.path.endswith(end)), "generate")
    body["model"] = MODELS[task]
    if task == "generate" and not body.keys() & set(MOST_TOKENS):
        body["max_output_tokens" if case.path.endswith("/responses") else "max_tokens"] = 4


def _within(value: Any, least: float, most: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return min(max(value, least), most)
