"""Whether what a caller gave is of the kind that is asked for; pure."""

from collections.abc import Mapping

from tidemill.protocol.errors import InvalidRequest

#: Longer than any job lives.
_MAX_TIMEOUT_SECONDS = 10**9

_NUMBERS = frozenset(
    {
        "n",
        "best_of",
        "length_penalty",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "prompt_logprobs",
        "thinking_token_budget",
        "seed",
        "priority",
    }
)
_TEXTS = frozenset({"model", "cache_salt", "prefix_id", "lora"})
_FLAGS = frozenset(
    {
        "stream",
        "include_stop_str_in_output",
        "ignore_eos",
        "use_beam_search",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)


def check_kinds(options: Mapping[str, object]) -> None:
    """Refuse what would be taken for a number, a text or a flag only by guessing."""
    for name, value in options.items():
        if name in _NUMBERS and isinstance(value, bool | str | bytes):
            raise _wrong_kind(name, value, "a number")
        if name in _TEXTS and isinstance(value, bytes):
            raise _wrong_kind(name, value, "text")
        if name in _FLAGS and not isinstance(value, bool):
            raise _wrong_kind(name, value, "True or False")


def check_job_id(job_id: str) -> None:
    """Raise ``InvalidRequest`` unless the id is a text; its form is checked where it is read."""
    if not isinstance(job_id, str):
        raise _wrong_kind("job_id", job_id, "a job id")


def check_timeout(timeout: float | None) -> None:
    """Raise ``InvalidRequest`` unless it is None or a number of seconds."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise _wrong_kind("timeout", timeout, "a number of seconds")
    # False for NaN too.
    if not abs(timeout) <= _MAX_TIMEOUT_SECONDS:
        raise InvalidRequest(
            f"timeout: {shown(timeout)} s is more than {_MAX_TIMEOUT_SECONDS} s",
            field="timeout",
            fix="Leave it out for no limit.",
        )


def check_top_n(top_n: int | None) -> None:
    """Raise ``InvalidRequest`` unless it is None or a number of documents to keep."""
    if top_n is None:
        return
    if isinstance(top_n, bool) or not isinstance(top_n, int):
        raise _wrong_kind("top_n", top_n, "a number")
    if top_n < 1:
        raise InvalidRequest(
            f"top_n: {shown(top_n)} is not 1 or more",
            field="top_n",
            fix="Leave it out to keep all documents.",
        )


def shown(value: object) -> str:
    """Return the beginning of ``str(value)``, also of a number too long for that."""
    try:
        return str(value)[:40]
    except ValueError:
        return "a number of thousands of digits"


def _wrong_kind(name: str, value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {type(value).__name__} is not {wanted}", field=name)
