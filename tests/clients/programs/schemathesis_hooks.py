"""What schemathesis cannot know of the gateway: names that exist, and what agrees with what."""

import json
import os
from random import Random
from typing import Any

import schemathesis

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
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "min_tokens"), (0, 1)),
    **dict.fromkeys(("n", "top_n", "top_k", "truncate_prompt_tokens"), (1, 2)),
    **dict.fromkeys(("priority", "max_retries"), (0, 9)),
    "seed": (0, 2**31),
}
#: Of all requests: jobs that need not wait, and may take the time that they take.
HASTE: dict[str, tuple[float, float]] = {
    **dict.fromkeys(MOST_TOKENS, (-1, 24)),
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
}
CHAT = [{"role": "user", "content": "hi"}]


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


def _tame(case: schemathesis.Case, body: dict[str, Any], chance: Random) -> None:
    for name in [name for name in body if name in HARD and chance.random() < 0.9]:
        del body[name]
    for name in body.keys() & RANGES.keys():
        body[name] = _within(body[name], *RANGES[name])
    if isinstance(body.get("messages"), list):
        body["messages"] = CHAT
    task = next((task for end, task in TASKS.items() if case.path.endswith(end)), "generate")
    body["model"] = MODELS[task]
    if task == "generate" and not body.keys() & set(MOST_TOKENS):
        body["max_output_tokens" if case.path.endswith("/responses") else "max_tokens"] = 4


def _within(value: Any, least: float, most: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return min(max(value, least), most)
